"""Several processes over gloo: real ones, two and four of them."""

import fcntl
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import by_blocks
import distributed_job
import pytest
import torch
import torch.distributed as dist
from distributed_job import (
    BY_BLOCKS,
    FAULTS,
    VARIANTS,
    child,
    every_optimizer,
    fitted,
    losses,
    same_training,
    wide_model,
)
from one_ledger import SCENARIOS
from scipy import stats
from torch import Tensor

import privgrad as pg
from conftest import forking, make_plan
from privgrad.processes import ALONE
from privgrad.training import distributed

JOBS = [
    "same_training",
    "noise",
    "noise_memory",
    "sampling",
    *(["parts"] if find_spec("datasets") else []),
    "fitted_in_parts",
    "empty_batches",
    "a_failure_is_everyones",
    "refusals",
    "input_maps",
    "noise_of_shards",
    "one_sharded",
]


def started(count: int, folder: Path, *jobs: str, ends: Sequence[int] = ()) -> None:
    """Do the jobs in so many processes, forked from one that has imported everything."""
    context = forking()
    store = folder / f"store{uuid4()}"
    processes = [context.Process(target=child, args=(rank, count, store, folder, jobs)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == list(ends or [0] * count)


def launched(count: int, folder: Path, *jobs: str) -> None:
    """As `started`, by torchrun."""
    path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    job = [str(Path(distributed_job.__file__)), str(folder), *jobs]
    done = subprocess.run([*command, *job], env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """How many processes, and what each job gave; done once, also where several workers of pytest-xdist ask for it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"together{request.param}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / f"{JOBS[-1]}.pt").exists():
            started(request.param, folder, *JOBS)
    return request.param, {name: torch.load(folder / f"{name}.pt") for name in JOBS}


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """As `together`: two processes, and what the jobs of slow tests gave."""
    folder, jobs = tmp_path_factory.mktemp("longer"), ["every_training", "every_optimizer", "losses"]
    started(2, folder, *jobs)
    return 2, {name: torch.load(folder / f"{name}.pt") for name in jobs}


def require_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-8, msg=lambda text, name=name: name + text)


def require_the_ends_of_one(ends: dict[str, dict[str, Tensor]], count: int, folder: Path) -> None:
    assert len(ends) == count
    alone = same_training(ALONE, folder, {name.split(", ")[0] for name in ends})
    for name, end in ends.items():
        require_equal(alone[f"{name.split(', ')[0]}, whole"], end)


def test_any_number_of_processes_trains_as_one_whole_or_sharded(together: tuple[int, dict[str, Any]], tmp_path: Path):
    require_the_ends_of_one(together[1]["same_training"], 8, tmp_path)  # three of five by blocks


@pytest.mark.slow
def test_two_processes_train_as_one_in_every_variant(longer: tuple[int, dict[str, Any]], tmp_path: Path):
    require_the_ends_of_one(longer[1]["every_training"], len(BY_BLOCKS) + len(VARIANTS), tmp_path)


def test_all_processes_use_the_same_input_maps_at_each_step(together: tuple[int, dict[str, Any]], tmp_path: Path):
    count, results = together
    (alone,) = distributed_job.input_maps(ALONE, tmp_path)
    steps = [torch.cat([matrix.flatten() for matrix in maps.values()]) for maps in alone]
    assert [torch.equal(one, next_one) for one, next_one in itertools.pairwise(steps)] == [True, False, True, False]
    assert len(results["input_maps"]) == count
    for rank, mine in enumerate(results["input_maps"]):
        first = results["input_maps"][rank - rank % count]
        for step, maps in enumerate(mine):
            assert all(torch.equal(matrix, first[step][name]) for name, matrix in maps.items())
            require_equal(alone[step], maps)


@pytest.mark.slow
def test_every_optimizer_moves_a_sharded_model_as_a_whole_one(longer: tuple[int, dict[str, Any]], tmp_path: Path):
    for name, end in every_optimizer(ALONE, tmp_path).items():
        require_equal(end, longer[1]["every_optimizer"][name])


def test_one_noise_whatever_the_number_of_processes(together: tuple[int, dict[str, Any]]):
    count, results = together
    by_process = results["noise"]
    size = sum(p.numel() for p in wide_model().parameters())
    for step in ("0", "1"):
        first = by_process["0"][step]
        assert all(torch.equal(by_process[str(rank)][step], first) for rank in range(count))
        # sigma C / B = 1 / 8; a chi-square within 4 standard deviations. A noise a process would have count times it.
        square = float((first.double() * 8).square().mean())
        assert abs(square - 1) < 4 * math.sqrt(2 / size) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([by_process["0"]["0"], by_process["0"]["1"]]))[0, 1])) < 4 / size**0.5


def test_noise_with_memory_is_that_of_one_process(together: tuple[int, dict[str, Any]], tmp_path: Path):
    """The noise and what it states, in all processes; and nobody is drawn in two groups."""
    count, results = together
    ((alone, wanted, _),) = distributed_job.noise_memory(ALONE, tmp_path)
    assert len(results["noise_memory"]) == count
    for flat, stated, drawn in results["noise_memory"]:
        assert torch.equal(flat, alone)
        assert stated == wanted
        for example in range(32):
            assert len({step % 3 for step, examples in enumerate(drawn) if example in examples}) <= 1


def test_each_process_draws_its_own_examples_from_its_own_stream(together: tuple[int, dict[str, Any]]):
    count, results = together
    fresh, seeded = ([drawn[kind] for drawn in results["sampling"]] for kind in (0, 1))
    assert len({stream for drawn in fresh for _, stream in drawn}) == count
    for rank, drawn in enumerate(fresh):
        assert all(index % count == rank for indices, _ in drawn for index in indices)
    # 400 steps of 64 examples at rate 1/4; then pairs of examples of two processes, drawn together at 1/16.
    sizes = torch.tensor([[len(indices) for indices, _ in drawn] for drawn in fresh], dtype=torch.float64)
    deviation = math.sqrt(64 * 400 * 0.25 * 0.75)
    assert abs(float(sizes.sum()) - 6400) < 4 * deviation
    if count == 2:
        both = sum(
            2 * k in one and 2 * k + 1 in other for (one, _), (other, _) in zip(*fresh, strict=True) for k in range(32)
        )
        assert abs(both - 12800 / 16) < 4 * math.sqrt(12800 / 16 * 15 / 16)
    plan = make_plan(num_examples=64, expected_batch_size=16, steps=400, seed=5)
    alone = [batch.examples[0].tolist() for batch in plan.batches(torch.utils.data.TensorDataset(torch.arange(64)))]
    for step, wanted in enumerate(alone):
        assert sorted(index for drawn in seeded for index in drawn[step][0]) == wanted


def test_each_process_draws_its_own_part_without_the_others(together: tuple[int, dict[str, Any]]):
    pytest.importorskip("datasets")
    count, results = together
    drawn = [found for found, _ in results["parts"]]
    for name in drawn[0]:
        steps = [[row for each in drawn for row in each[name][step]] for step in range(12)]  # in the order of the parts
        assert all(len(set(rows)) == len(rows) for rows in steps)
        assert all(
            row // (64 // count) == rank for rank, each in enumerate(drawn) for rows in each[name] for row in rows
        )
        if name.startswith("epochs"):
            epochs = [sorted(itertools.chain(*steps[first : first + 4])) for first in (0, 4, 8)]
            assert epochs == [list(range(64))] * 3
        if name.endswith("5"):
            changed = {"sampling": name.split()[0], "num_examples": 64, "expected_batch_size": 16, "steps": 12}
            plan = make_plan(**changed, seed=5)
            alone = plan.batches(torch.utils.data.TensorDataset(torch.arange(64)))
            assert steps == [batch.examples[0].tolist() for batch in alone]
    for _, said in results["parts"]:
        assert all("to be given in all processes or in none, and no row to two" in text for text in said)


def test_a_training_of_parts_goes_on_within_its_epoch(together: tuple[int, dict[str, Any]]):
    for counted, files in together[1]["fitted_in_parts"]:
        assert counted == [8, 8, 8]
        assert files == ["checkpoint.pt", "ledger.jsonl"]


def test_processes_without_examples_take_part(together: tuple[int, dict[str, Any]]):
    sizes, releases = together[1]["empty_batches"]
    assert releases == 12
    assert any(0 in step and sum(step) > 0 for step in zip(*sizes, strict=True))
    assert any(sum(step) == 0 for step in zip(*sizes, strict=True))


def test_a_failure_in_one_process_stops_the_step_in_all_and_charges_nothing(together: tuple[int, dict[str, Any]]):
    count, results = together
    for outcomes, releases in results["a_failure_is_everyones"]:
        assert releases == 4
        for rank, told in enumerate(outcomes):
            assert told[:2] + told[3:] == ["released"] * 4
            assert told[2].startswith(
                "ArithmeticError" if rank == count - 1 else "PrivacyError: PrivateGradient: expected each"
            )


def require_independent(noises: Tensor) -> None:
    """Rows of standard normals: each of standard deviation 1 within 1 %, and no two correlated."""
    count, size = noises.shape
    assert size >= 1_000_000
    assert float((noises.square().mean(1).sqrt() - 1).abs().max()) < 0.01
    apart = torch.corrcoef(noises) - torch.eye(count)
    assert float(apart.abs().max()) < 6 / size**0.5  # standard errors: many pairs are compared


def test_each_process_draws_its_own_part_of_one_noise(together: tuple[int, dict[str, Any]]):
    count, results = together
    # By step and shard, in units of sigma C / B.
    require_independent(results["noise_of_shards"].flatten(1).view(2 * count, -1).double() * 8)


def test_shards_are_clipped_and_added_as_the_whole(together: tuple[int, dict[str, Any]]):
    require_equal(by_blocks.ends("layers", ALONE), together[1]["one_sharded"])


_UPDATE = "call optimizer.step, scheduler.step and load_state_dict in all processes"
REFUSED = {
    "untold": "pass processes=",
    "untold_batches": "pass processes=",
    "foreign_batch": "the same processes",
    "other_plans": "to be the same in all processes",
    "other_public": "to be the same in all processes (precondition inputs(",
    "other_filter": "to be the same in all processes (filter EMA(0.5))",
    "other_groups": "and draw alike",
    "wrapped": "pass its .module",
    "wrapped_inside": "at '0'; pass its .module",
    "wrapped_by_fsdp1": "pass its .module",
    "part_of_the_world": "to hold every process",
    "other_order": "in the same order",
    "other_length": "in the same order",
    "other_bound": "to be the same in all processes (C 0.5)",
    "groups": "train in one process",
    "not_private": "train in one process",
    "vmap_by_blocks": "a sharded model to be computed by blocks, got engine='vmap'",
    "perturbed_by_blocks": "got SAT(",
    "preconditioned_by_blocks": "got inputs(",
    "tensor_parallel": "by fully_shard alone, got '0.weight'",
    "two_dimensions": "to be split over all processes in one dimension",
    "other_dimension": "to be split along dimension 0",
    "a_list_of_modules": "to have one module in each call of fully_shard",
    "computed_weight": "to hold its weights",
    "tied_blocks": "to have no weight in two blocks",
    "whole_over_blocks": "to have its parameters in one block",
    "truncated": "to be 'poisson' for ClassRates, and not 'truncated' in several processes",
    "update_in_one": _UPDATE,
    "update_in_all_but_one": _UPDATE,
    "update_of_one_shard": _UPDATE,
    "schedule_in_one": _UPDATE,
    "loaded_in_one": _UPDATE,
    "cast_by_fsdp": "under torch.autocast(device, torch.bfloat16)",
    "other_record": "give PrivateGradient(..., ledger=) from the start",
    "other_ledger": "ledger to be given to the first process only",
    "other_path": "ledger to be given in the first process, got a path",
    "other_layers": "to be torch.float32 of shape (3,), trained, not sharded, as in the first process",
    "other_frozen": "got torch.float64 of shape (7,), not trained",
    "other_evaluations": "expected evaluate to be the same in all processes (given)",
    "other_blocks": "to be torch.float64 of shape (7,), trained, sharded by '0', as in the first process",
    "sharded_later": "fully_shard to be called before it and the optimizer are made",
    "read_outside": "to read parameters of its own block",
    "method_of_fsdp": "to have no method of register_fsdp_forward_method, got '.extra_repr'",
    "other_rates": "expected optimizer lr to be the same in all processes (0.1)",
    "other_folders": "expected output_dir to be the same in all processes (given)",
}


@pytest.mark.parametrize(("case", "words"), REFUSED.items())
def test_what_would_be_wrong_is_refused_in_every_process(together: tuple[int, dict[str, Any]], case: str, words: str):
    count, results = together
    for rank, said in enumerate(results["refusals"]):
        mine = said[case]
        of_another = case.startswith("other_") and rank < count - 1
        assert words in mine or (of_another and "an exception in at least one" in mine), mine


def test_a_data_set_that_changes_its_items_by_chance_is_the_same_everywhere(together: tuple[int, dict[str, Any]]):
    assert {said["changing"] for said in together[1]["refusals"]} == {"nothing"}


@pytest.mark.parametrize(
    "case", ["averaged_in_one", "frozen", "same_dtype_of_fsdp", "autocast_of_fsdp", "sharded_anew"]
)
def test_what_leaves_the_models_alike_is_accepted(together: tuple[int, dict[str, Any]], case: str):
    assert {said[case] for said in together[1]["refusals"]} == {"nothing"}


@pytest.fixture(scope="module")
def stated(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """What each of two processes states at the end of each scenario."""
    folder = tmp_path_factory.mktemp("stated")
    started(2, folder, "killed", ends=[0, -signal.SIGKILL])
    started(2, folder, "one_ledger")
    return 2, {"one_ledger": torch.load(folder / "one_ledger.pt")}


@pytest.mark.parametrize("case", [scenario.__name__ for scenario in SCENARIOS])
def test_all_processes_state_the_same_of_one_ledger(stated: tuple[int, dict[str, Any]], case: str):
    (by_process,) = stated[1].values()
    first, *others = (said[case] for said in by_process)
    wanted, (epsilon, releases, *_) = first
    assert others == [first]
    assert releases == wanted
    assert epsilon > 0 or wanted == 0


ENDINGS = """
import gc, os, sys
import torch
import torch.distributed as dist
from privgrad.integrations import distributed

def end(folder):
    sys.setswitchinterval(1000)  # seconds: this thread gives the interpreter away only where it has to wait
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=0, world_size=1)
    distributed.Distributed()
    dist.all_reduce(torch.ones(1000), async_op=True)  # which a thread of gloo ends, and frees

gc.freeze()
for turn in range(6):
    child = os.fork()
    if child == 0:
        end(f"{sys.argv[1]}/store{turn}")
        break  # and comes to its end as any program does
    if os.waitpid(child, 0)[1]:
        sys.exit("a process was aborted as it ended")
"""


@pytest.mark.slow
def test_gloo_aborts_no_process_that_ends(tmp_path: Path):
    """Without the wait at exit, about half of these processes abort."""
    command = [sys.executable, "-W", "ignore", "-c", ENDINGS, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_wait_at_exit_is_registered_once_and_for_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    registered: list[Any] = []
    monkeypatch.setattr(distributed.atexit, "register", lambda *call: registered.append(call))
    distributed._let_gloo_finish.cache_clear()
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        distributed.Distributed()
        distributed.Distributed()
        assert registered == [(time.sleep, 0.1)]
    finally:
        dist.destroy_process_group()
        distributed._let_gloo_finish.cache_clear()


@pytest.mark.slow
def test_a_sharded_job_of_torchrun_ends_well_ten_times(tmp_path: Path):
    for turn in range(10):
        (folder := tmp_path / f"{turn}").mkdir()
        (folder / "steps").write_text("2")
        launched(2, folder, "fitted")


@pytest.mark.slow
def test_losses_agree_in_distribution(longer: tuple[int, dict[str, Any]], tmp_path: Path):
    compared: Any = stats.ks_2samp(losses(ALONE, tmp_path), longer[1]["losses"])
    assert compared.pvalue > 1e-4


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_number_of_processes(tmp_path: Path):
    (alone := tmp_path / "alone").mkdir()
    (alone / "steps").write_text("10")
    end = fitted(ALONE, alone)["whole"]
    for start, count, steps in (
        (started, 2, "2"),
        (started, 3, "4"),
        (started, 4, "6"),
        (started, 1, "8"),
        (launched, 2, "10"),
    ):
        (tmp_path / "steps").write_text(steps)
        start(count, tmp_path, "fitted")
    for kind in ("whole", "sharded"):
        require_equal(end, torch.load(tmp_path / "fitted.pt")[kind])
        assert pg.Ledger(tmp_path / kind / "ledger.jsonl", read_only=True).releases == 10


def test_planted_faults_of_several_processes_are_caught(tmp_path: Path):
    """Each under the test that docs/trust.md names, which passes without the fault."""
    started(2, tmp_path, *FAULTS)
    for name, mutant in FAULTS.items():
        given = {**cast("dict[str, Any]", mutant.given)}
        results = {given.pop("job"): torch.load(tmp_path / f"{name}.pt")}
        if given.get("case") in REFUSED:
            given["words"] = REFUSED[given["case"]]
        with pytest.raises(AssertionError):
            globals()[mutant.caught_by.split(".")[1]]((2, results), **given)
