"""`whatif --set`, `run --with` and `tune --only` take either spelling of one change."""

from __future__ import annotations

import pytest

from stepscope.changes import APPLIED, APPLIED_AS, CHANGES, PREDICTED, WHATIF_OF
from stepscope.errors import UsageError
from stepscope.fix.named_changes import choose, choose_all
from stepscope.predict.whatifs import find_prediction, parse_setting, settings_for_remedy
from stepscope.ui.tune.plan import WantedRemedies

# Predicted by what they do to something else: what-ifs of the same words are wider than these.
_WIDER = {"gc-freeze": "no-stalls=gc", "compress-gradients": "bandwidth=2"}


@pytest.mark.parametrize("fix", [name for name in APPLIED if settings_for_remedy(name)])
def test_whatif_takes_every_fix_that_it_can_predict(fix):
    setting = parse_setting(fix)
    assert setting.name in PREDICTED
    assert str(setting) == WHATIF_OF.get(fix, _WIDER.get(fix, fix))
    assert setting.value or not PREDICTED[setting.name].takes_value or fix == "compile"


@pytest.mark.parametrize(("whatif", "fix"), sorted(APPLIED_AS.items()))
def test_a_fix_is_chosen_by_the_spelling_of_its_whatif(whatif, fix):
    parse_setting(whatif)  # it is one
    assert str(choose(whatif)) in (str(choose(fix)), whatif)
    only = WantedRemedies.parse([whatif], [], "bit-identical").only
    assert only in ((fix,), (str(choose(fix)),), (whatif,))
    assert WantedRemedies.parse([whatif], [], "rounding").wants(choose(whatif))


@pytest.mark.parametrize("name", sorted(set(PREDICTED) & set(APPLIED)))
def test_one_name_means_one_change_in_both(name):
    """The values that tune tries are values of the what-if, or the table says which is meant."""
    for value in APPLIED[name].values:
        text = f"{name}={value}" if value else name
        if text != "threads=half":
            assert parse_setting(text).name == name


def test_a_fix_without_a_value_means_the_same_in_both():
    for fix, whatif in WHATIF_OF.items():
        if fix == whatif.partition("=")[0]:
            assert choose(fix) == choose(whatif)


def test_what_is_printed_stays_as_it_was():
    assert [str(one) for one in choose_all(["precision=bf16", "optimizer=fused", "compile"])] == [
        "bf16", "fused-optimizer", "compile=default",
    ]  # fmt: skip
    assert str(parse_setting("fused-optimizer")) == "optimizer=fused"
    assert str(choose("threads=fit")) == "threads=cores"
    assert str(choose("threads=1")) == "threads=1"
    assert str(parse_setting("one-thread")) == "threads=1"
    assert str(choose("reduce-overhead")) == "compile=reduce-overhead"


def test_both_spellings_at_once_are_still_one_family():
    with pytest.raises(UsageError, match="cannot be applied together"):
        choose_all(["precision=tf32", "bf16"])
    with pytest.raises(UsageError, match="bf16 is in both"):
        WantedRemedies.parse(["precision=bf16"], ["bf16"], "rounding")


@pytest.mark.parametrize(
    ("text", "near"),
    [("fused_optimizer", "fused-optimizer"), ("precision=fp8", "precision=fp16"),
     ("worker", "loader-workers"), ("checkpointing", "activation-checkpointing")],
)  # fmt: skip
def test_an_unknown_fix_suggests_near_ones(text, near):
    with pytest.raises(UsageError, match="did you mean") as refusal:
        choose(text)
    assert near in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "near"), [("precison=bf16", "precision"), ("fused", "fused-optimizer"),
                       ("graphs", "cuda-graphs")],
)  # fmt: skip
def test_an_unknown_whatif_suggests_near_ones(text, near):
    with pytest.raises(UsageError, match="did you mean") as refusal:
        parse_setting(text)
    assert near in str(refusal.value)


def test_nothing_near_lists_everything():
    with pytest.raises(UsageError, match=r"There are .*fused-optimizer"):
        choose("zzzz")
    with pytest.raises(UsageError, match=r"There are .*precision"):
        find_prediction("zzzz")


def test_a_known_change_of_the_other_verb_is_named_as_such():
    assert {"cuda-graphs", "cudnn-benchmark"} <= set(CHANGES)
    with pytest.raises(UsageError, match="cannot apply the change 'cuda-graphs'"):
        choose("cuda-graphs")
    with pytest.raises(UsageError, match="cannot predict the change 'cudnn-benchmark'"):
        parse_setting("cudnn-benchmark")
