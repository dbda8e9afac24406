"""What stepscope says of public scripts is compared with what changing the script gives."""

import pytest

from field_answers import LIST, Question, changed_script, variants
from field_answers_table import batch_gain, loader_rows, table
from field_scripts import read_scripts
from field_trial import NoTrialError


def _question(**changes):
    row = {
        "name": "one",
        "repository": "owner/name",
        "path": "train.py",
        "command": "python train.py --batch 4",
        "twice": [["command", "--batch 4", "--batch 8"]],
        "workers": [["train.py", "num_workers=2", "num_workers={workers}"]],
        "tries": {"two threads": [["env:OMP_NUM_THREADS", "", "2"]]},
    }
    return Question(**row | changes)


def _saved(measured, whatif=None):
    results = {name: [{"mean_ms": ms, "within_ms": ms}] for name, ms in measured.items()}
    explained = {"verdict": "Waiting for data", "next": "fewer workers", "whatif": whatif or {}}
    return {"explained": explained, "measured": results}


def test_every_change_is_made_in_its_place():
    question = _question(edits={"train.py": [["cuda", "cpu"]]})
    changes = variants(question)
    assert list(changes) == [
        "as it is",
        "twice the batch",
        *(f"{n} loader workers" for n in (0, 1, 4)),  # it has two
        "two threads",
    ]
    assert changed_script(question, changes["twice the batch"]).command.endswith("--batch 8")
    fewer = changed_script(question, changes["0 loader workers"])
    assert fewer.edits["train.py"] == [["cuda", "cpu"], ["num_workers=2", "num_workers=0"]]
    assert changed_script(question, changes["two threads"]).env == {"OMP_NUM_THREADS": "2"}
    assert question.edits == {"train.py": [["cuda", "cpu"]]}


def test_a_change_of_a_command_that_does_not_say_so_is_refused():
    with pytest.raises(NoTrialError, match="--batch 9"):
        changed_script(_question(), [["command", "--batch 9", "--batch 18"]])


def test_the_list_can_be_read_and_every_command_can_be_changed():
    questions = read_scripts(LIST, Question)
    for question in questions:
        for change in variants(question).values():
            changed_script(question, change)
    assert len({question.name for question in questions}) == len(questions) >= 40


def test_a_batch_is_inside_its_interval_relative_to_each_own_step():
    said = {"baseline_ms": 10.0, "predicted_ms": 12.0, "low_ms": 11.0, "high_ms": 14.0}
    inside = batch_gain(_saved({"as it is": 20, "twice the batch": 26}, {"batch=x2": said}))
    assert inside == {"words": "1.67x (1.43 to 1.82) -> 1.54x", "inside": True}
    outside = batch_gain(_saved({"as it is": 20, "twice the batch": 40}, {"batch=x2": said}))
    assert outside is not None
    assert not outside["inside"]
    assert batch_gain(_saved({"as it is": 20})) is None


def test_an_unanswered_question_is_no_prediction():
    refused = {"problem": "there is no what-if 'loader-workers'"}
    rows = loader_rows(
        _saved({"as it is": 20, "0 loader workers": 10}, {"loader-workers=0": refused})
    )
    (row,) = rows
    assert (row["said"], row["measured"]) == (None, 0.5)


def test_the_summary_counts_signs_and_errors():
    said = {
        f"loader-workers={n}": {"baseline_ms": 10.0, "predicted_ms": ms}
        for n, ms in ((0, 5.0), (1, 20.0))
    }
    measured = {"as it is": 10, "0 loader workers": 8, "1 loader workers": 8}
    text = table([(_question(), _saved(measured, said))])
    assert "loader workers: 1 of 2 signs right, 1 of 2 where the interval is on one side" in text
    assert "94% mean error" in text
    assert "0: 0.50 / 0.80; 1: 2.00 / 0.80" in text
