"""What TensorBoard shows is the curve: read back from the event file by TensorBoard itself."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.diagnostics import RawRecorder
from privgrad.integrations.tensorboard import TensorBoard
from privgrad_lab.load_spec import check_spec
from privgrad_lab.runner import train


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags: Any = accumulator.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags}


def test_each_evaluation_is_a_point_and_what_is_not_private_says_so(tmp_path: Path):
    model, plan = make_model(), make_plan(steps=6, seed=1, delta=1e-3)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    diary, board = RawRecorder(optimizer), TensorBoard(tmp_path, names={"accuracy": "recall@5"})

    def evaluate(_: Any) -> dict[str, Any]:
        return {"accuracy": 0.5, "loss": float("nan"), **diary.row()}

    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    private_grad.register_raw_observer(diary.observe)
    result = pg.fit(
        private_grad, optimizer, make_data(), evaluate=evaluate, num_evaluations=3, on_evaluate=board, progress=False
    )
    found = scalars(tmp_path)  # while the file is still open: as it is made
    board.close()
    assert [step for step, _ in found["epsilon"]] == [2, 4, 6]
    for (_, value), row in zip(found["epsilon"], result.curve, strict=True):
        assert value == pytest.approx(row["epsilon"])
    assert found["recall@5"] == [(2, 0.5), (4, 0.5), (6, 0.5)]
    layer = [row["raw_layers"]["0"]["fraction_floored"] for row in result.curve]
    assert [value for _, value in found["NOT_PRIVATE/raw_layers/0/fraction_floored"]] == pytest.approx(layer)
    assert "NOT_PRIVATE/raw_clip_fraction" in found
    assert not any("raw_" in tag and not tag.startswith("NOT_PRIVATE/") for tag in found)
    assert not {"loss", "accuracy", "step"} & found.keys()  # no point is better than one that is not a number


def test_an_experiment_writes_its_runs(tmp_path: Path, by_rdp: None):
    pytest.importorskip("sklearn")
    spec = check_spec(
        {
            "title": "a test",
            "data": {"use": "digits"},
            "model": {"use": "linear"},
            "privacy": {
                "noise_multiplier": 4.0,
                "delta": 1e-5,
                "max_grad_norm": 1.0,
                "num_examples": 1437,
                "expected_batch_size": 120,
                "steps": 4,
            },
            "methods": [{"name": "DP-SGD", "optimizer": {"use": "SGD", "lr": 0.5}}],
            "run": {"num_evaluations": 2, "tensorboard": True},
        },
        "test",
    )
    (record,) = train(spec, tmp_path, seed=1, progress=False)
    (folder,) = tmp_path.glob("runs/*/tensorboard")
    found = scalars(folder)
    assert found["accuracy"] == [(row["step"], pytest.approx(row["accuracy"])) for row in record["curve"]]
    assert not any("raw_" in tag for tag in found)
