"""The models are the published ones, and the rules and geometry they train on are right."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from stepscope.bench.catalogue import load
from stepscope.bench.workload import Config, TrainingPlace
from stepscope.bench.workloads import (
    graphs_and_points,
    instance_segmentation,
    object_detection,
    reinforcement_learning,
    tabular,
)
from stepscope.bench.workloads.object_detection import (
    crop_regions,
    decode,
    encode,
    make_anchors,
    match,
    overlap,
)
from stepscope.bench.workloads.reinforcement_learning import GoGames

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = TrainingPlace(torch.device("cpu"))
NAMES = (
    "actor-critic", "dlrm", "efficientdet", "gat", "mask-rcnn", "minigo", "ncf", "pointnet-cls",
    "pointnet-seg",
)  # fmt: skip
# Model -> parameters, and who says so.
PUBLISHED = {
    # Tan et al., table 2.
    "efficientdet": (object_detection.EfficientDet, 3.9e6),
    # torchvision's maskrcnn_resnet50_fpn: 44,401,393 without the norms' 53,120.
    "mask-rcnn": (instance_segmentation.MaskRCNN, 44_401_393 + 53_120),
    # Naumov et al., section 5: "approximately 540M parameters".
    "dlrm": (tabular.DLRM, 540e6),
    # Qi et al., table 6.
    "pointnet-cls": (graphs_and_points.PointNetClassifier, 3.5e6),
    # Figure 2 by hand: the features of the classifier (3,480,049 less its head of 667,944), then
    # 1088-512-256-128-128-50 with norms.
    "pointnet-seg": (
        graphs_and_points.PointNetSegmenter,
        2_812_105 + (1089 * 512 + 513 * 256 + 257 * 128 + 129 * 128 + 129 * 50) + 2 * 1024,
    ),
    # MLPerf 0.5's shape by hand: tables, 256-256-128-64, 128-1.
    "ncf": (tabular.NeuMF, (138_493 + 26_744) * 192 + 257 * 256 + 257 * 128 + 129 * 64 + 129),
    # Section 3.3 by hand: 50-4x256-4x256-6x121, two attention vectors a head, biases.
    "gat": (graphs_and_points.GAT, (50 + 3) * 1024 + (1024 + 3) * 1024 + (1024 + 3) * 726),
    # Section 5.1 by hand, with three actions: 84 x 84 x 4, 16 of 8 x 8, 32 of 4 x 4, 256.
    "actor-critic": (
        reinforcement_learning.ActorCritic,
        257 * 16 + 257 * 32 + (9 * 9 * 32 + 1) * 256 + 257 * 4,
    ),
    # Methods by hand: the first convolution, 19 blocks, the policy's and the value's head.
    "minigo": (
        reinforcement_learning.GoNet,
        (17 * 9 * 256 + 512)
        + 19 * 2 * (256 * 9 * 256 + 512)
        + (2 * 256 + 4 + (2 * 361 + 1) * 362)
        + (256 + 2 + 362 * 256 + 257),
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_paper_size_has_the_published_number_of_parameters(name: str) -> None:
    model, parameters = PUBLISHED[name]
    with torch.device("meta"):
        built: nn.Module = model(load(name).config("paper"))
    assert sum(each.numel() for each in built.parameters()) == pytest.approx(parameters, rel=0.01)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As `bench --size tiny` trains: with several, sums over a graph's edges vary in order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(name: str, steps: int, seed: int = 0, **changes: int) -> list[float]:
    workload = load(name)
    torch.manual_seed(seed)
    place = TrainingPlace(torch.device("cpu"), seed=seed)
    step = workload.build(workload.config("tiny", changes), place)
    return [step(number).item() for number in range(steps)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_two_trainings_with_one_seed_are_the_same(name: str) -> None:
    first = losses(name, 2, batch=2)
    assert all(math.isfinite(loss) for loss in first)
    assert losses(name, 2, batch=2) == first


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_tiny_reaches_its_target(name: str, seed: int) -> None:
    target = load(name).targets["tiny"]
    last = losses(name, target.steps, seed)[-target.over :]
    assert sum(last) / len(last) < target.loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on processors without bf16
@pytest.mark.parametrize("name", NAMES)
def test_autocast_and_channels_last_train_too(name: str) -> None:
    workload = load(name)
    models = []

    class Place(TrainingPlace):
        def put(self, model: nn.Module) -> nn.Module:
            models.append(model)
            return model

    step = workload.build(workload.config("tiny", {"batch": 2}), Place(torch.device("cpu")))
    for parameter in models[0].parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(0)
    assert math.isfinite(loss.item())
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_the_samples_of_a_step(name: str) -> None:
    """What the model is trained on has `batch` samples, or `batch` games with their moves."""
    workload, seen = load(name), []

    class Place(TrainingPlace):
        def put(self, model: nn.Module) -> nn.Module:
            model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
            return model

    config = workload.config("tiny", {"batch": 3})
    workload.build(config, Place(torch.device("cpu")))(0)
    per_sample = {"gat": config.get("nodes"), "actor-critic": config.get("moves")}
    per_sample["minigo"] = config.get("moves")
    assert seen[-1] == 3 * per_sample.get(name, 1)


def stones(rows: str) -> torch.Tensor:
    """X is the player to move, O the other."""
    return torch.tensor([{"X": 1.0, "O": -1.0, ".": 0.0}[each] for each in rows.replace(" ", "")])


def after(rows: str, move: int) -> torch.Tensor:
    """The board as the player who moved sees it."""
    games = GoGames(1, 5, torch.device("cpu"))
    games.history[0, 0] = stones(rows)
    games.play(torch.tensor([move]))
    return -games.history[0, 0]


def test_go_takes_groups_without_liberties() -> None:
    board = after("OO... XX.O. ..... ..... .....", 2)
    assert board.equal(stones("..X.. XX.O. ..... ..... ....."))


def test_go_takes_a_group_of_any_form() -> None:
    board = after("OOOOO XXXXO OOOOO OXXXX OOO.X", 23)
    assert board.equal(stones("..... XXXX. ..... .XXXX ...XX"))


def test_go_takes_the_opponent_before_oneself() -> None:
    board = after(".OX.. OX... X.... ..... .....", 0)
    assert board.equal(stones("X.X.. .X... X.... ..... ....."))


def test_go_lets_stones_without_liberties_die() -> None:
    board = after(".O... O.... ..... ..... .....", 0)
    assert board.equal(stones(".O... O.... ..... ..... ....."))


def test_go_forbids_to_put_a_lone_stone_back_at_once() -> None:
    games = GoGames(1, 5, torch.device("cpu"))
    games.history[0, 0] = stones(".XO.. XO.O. .XO.. ..... .....")
    games.play(torch.tensor([7]))
    assert not games.allowed()[0, 6]
    games.play(torch.tensor([25]))
    assert games.allowed()[0, 6]


def test_go_counts_stones_and_what_only_they_reach() -> None:
    games = GoGames(1, 5, torch.device("cpu"))
    games.history[0, 0] = stones("..X.O ..X.O XXX.O ...OO OOOO.")
    # X has 5 + 4; O has 9 and 1, and the points between both belong to nobody.
    assert games.ahead().item() == -1
    games.history[0, 0] = stones("..XO. ..XO. XXXO. XXXO. XXXO.")
    assert games.ahead().item() == 1


def test_the_paddle_under_the_ball_is_the_best_reward() -> None:
    games = reinforcement_learning.start_games(load("actor-critic").config("tiny"), CPU)
    games.row[:], games.ball[:], games.paddle[:] = 0, 4, 3
    toward = games.move(torch.full_like(games.row, 2))
    assert toward.eq(1).all()
    away = games.move(torch.full_like(games.row, 0))
    assert away.lt(1).all()
    # The ball is one cell, the paddle three; a cell is 4 x 4 pixels.
    assert games.screens[:, -1].eq(1).sum((1, 2)).eq(16).all()
    assert games.screens[:, -1].eq(0.5).sum((1, 2)).eq(48).all()


def test_returns_are_discounted_from_the_end() -> None:
    rewards = torch.tensor([[1.0], [2.0]])
    returns = reinforcement_learning.discounted(rewards, torch.tensor([4.0]), 0.5)
    assert returns[:, 0].tolist() == [1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4]


def test_boxes_come_back_from_their_codes() -> None:
    config = Config({"image_height": 64, "image_width": 128})
    anchors = make_anchors(config, (16, 32), (4.0,), torch.device("cpu"))
    assert anchors.shape == ((4 * 8 + 2 * 4) * 3, 4)
    box = torch.tensor([10.0, 20.0, 40.0, 50.0])
    assert torch.allclose(decode(anchors, encode(anchors, box.expand(len(anchors), 4))), box)


def test_an_object_has_an_anchor_however_small_it_is() -> None:
    config = Config({"image_height": 64, "image_width": 64})
    anchors = make_anchors(config, (16,), (4.0,), torch.device("cpu"))
    boxes = torch.tensor([[[1.0, 1.0, 4.0, 4.0], [0.0, 0.0, 64.0, 64.0]]])
    index, positive = match(anchors, boxes, 0.5)
    assert set(index[positive].tolist()) == {0, 1}
    assert overlap(boxes, boxes)[0].tolist() == [
        [1.0, pytest.approx(9 / 4096)],
        [pytest.approx(9 / 4096), 1.0],
    ]


@pytest.mark.parametrize(("edge", "stride"), [(20, 4), (40, 8), (80, 16), (160, 32)])
def test_regions_are_cut_from_the_level_of_their_size(edge: int, stride: int) -> None:
    """Level maps hold their own pixel coordinates: a cut gives the coordinates of its bins."""
    size, levels = 256, []
    for step in (4, 8, 16, 32):
        at = (torch.arange(size // step) + 0.5) * step
        x, y = torch.meshgrid(at, at, indexing="xy")
        levels.append(torch.stack((x, y, torch.full_like(x, step)))[None])
    regions = torch.tensor([[[60.0, 70.0, 60.0 + edge, 70.0 + edge]]])
    cut = crop_regions(levels, regions, 2, edge_at_stride_16=80)[0]
    assert cut[2].eq(stride).all()
    assert torch.allclose(cut[0, 0], 60 + edge * torch.tensor([0.25, 0.75]), atol=1e-2)
    assert torch.allclose(cut[1, :, 0], 70 + edge * torch.tensor([0.25, 0.75]), atol=1e-2)


def test_attention_of_a_node_adds_up_to_one() -> None:
    receiver = torch.tensor([0, 0, 1, 2, 2, 2])
    shares = graphs_and_points.softmax_by_receiver(torch.randn(6, 3), receiver, 3)
    assert torch.allclose(torch.zeros(3, 3).index_add(0, receiver, shares), torch.ones(3, 3))
