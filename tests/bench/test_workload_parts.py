"""What single workloads train on is right: rules of Go, boxes, regions, experts, stripes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepscope.bench.catalogue import load
from stepscope.bench.workload import Config, TrainingPlace
from stepscope.bench.workloads import graphs_and_points, reinforcement_learning
from stepscope.bench.workloads.gans import gradient_penalty
from stepscope.bench.workloads.image_classifiers import make_stripes
from stepscope.bench.workloads.language_models import Experts
from stepscope.bench.workloads.object_detection import (
    crop_regions,
    decode,
    encode,
    make_anchors,
    match,
    overlap,
)
from stepscope.bench.workloads.reinforcement_learning import GoGames

CPU = torch.device("cpu")


def stones(rows: str) -> torch.Tensor:
    """X is the player to move, O the other."""
    return torch.tensor([{"X": 1.0, "O": -1.0, ".": 0.0}[each] for each in rows.replace(" ", "")])


def after(rows: str, move: int) -> torch.Tensor:
    """The board as the player who moved sees it."""
    games = GoGames(1, 5, CPU)
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
    games = GoGames(1, 5, CPU)
    games.history[0, 0] = stones(".XO.. XO.O. .XO.. ..... .....")
    games.play(torch.tensor([7]))
    assert not games.allowed()[0, 6]
    games.play(torch.tensor([25]))
    assert games.allowed()[0, 6]


def test_go_counts_stones_and_what_only_they_reach() -> None:
    games = GoGames(1, 5, CPU)
    games.history[0, 0] = stones("..X.O ..X.O XXX.O ...OO OOOO.")
    # X has 5 + 4; O has 9 and 1, and the points between both belong to nobody.
    assert games.ahead().item() == -1
    games.history[0, 0] = stones("..XO. ..XO. XXXO. XXXO. XXXO.")
    assert games.ahead().item() == 1


def test_the_paddle_under_the_ball_is_the_best_reward() -> None:
    games = reinforcement_learning.start_games(
        load("actor-critic").config("tiny"), TrainingPlace(CPU)
    )
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
    anchors = make_anchors(config, (16, 32), (4.0,), CPU)
    assert anchors.shape == ((4 * 8 + 2 * 4) * 3, 4)
    box = torch.tensor([10.0, 20.0, 40.0, 50.0])
    assert torch.allclose(decode(anchors, encode(anchors, box.expand(len(anchors), 4))), box)


def test_an_object_has_an_anchor_however_small_it_is() -> None:
    config = Config({"image_height": 64, "image_width": 64})
    anchors = make_anchors(config, (16,), (4.0,), CPU)
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


def test_stripes_follow_from_the_label_on_every_rank() -> None:
    """Images of one label on two ranks are more alike than those of two labels."""
    config = load("resnet50").config("tiny", {"batch": "64", "directions": "2"})
    sides = []
    for rank in (0, 1):
        images, labels = make_stripes(config, TrainingPlace(CPU, rank=rank, ranks=2))[0]
        sides.append([images[labels == label].mean(0).flatten() for label in (0, 1)])
    assert not torch.equal(sides[0][0], sides[1][0])
    likeness = nn.functional.cosine_similarity
    for label in (0, 1):
        same = likeness(sides[0][label], sides[1][label], dim=0)
        other = likeness(sides[0][label], sides[1][1 - label], dim=0)
        assert same > 0.8 > abs(other)


def test_penalty_is_of_the_gradients_length() -> None:
    """The critic 3 * sum has a gradient of 3 in each of n pixels: (3 * sqrt(n) - 1) squared."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.scale * images.sum((1, 2, 3))

    critic, images = Sum(), torch.randn(2, 1, 2, 2)
    penalty = gradient_penalty(critic, images, -images)
    assert penalty.item() == pytest.approx((3 * 2 - 1) ** 2)
    penalty.backward()
    assert critic.scale.grad is not None
    assert critic.scale.grad.item() == pytest.approx(2 * (3 * 2 - 1) * 2)


def test_an_expert_takes_no_more_than_its_capacity() -> None:
    experts = Experts(load("moe").config("tiny"))
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 0]])
    slots, first = experts.slots(chosen, capacity=2)
    full = 4 * 2
    # First choices before second ones: expert 0 is full after two words.
    assert slots.tolist() == [0, 1, full, 6, 2, 4, 3, full]
    assert first.tolist() == [0.75, 0.0, 0.0, 0.25]


def test_experts_add_what_the_chosen_ones_make() -> None:
    torch.manual_seed(0)
    experts = Experts(load("moe").config("tiny", {"capacity_factor": 4}))
    x = torch.randn(2, 5, experts.gate.in_features)
    out, balance = experts(x)
    weights, chosen = experts.gate(x).softmax(2).topk(2, 2)
    weights = weights / weights.sum(2, keepdim=True)
    made = nn.functional.gelu(torch.einsum("btw,ewf->btef", x, experts.up))
    made = torch.einsum("btef,efw->btew", made, experts.down)
    wanted = (made.gather(2, chosen[..., None].expand(-1, -1, -1, 64)) * weights[..., None]).sum(2)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    assert balance.item() >= 0.5
