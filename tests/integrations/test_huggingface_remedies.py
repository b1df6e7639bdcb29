"""Each remedy that PrivateTrainer names is followed: the same setup, with it, trains a step."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

import privgrad as pg

pytest.importorskip("transformers")
pytest.importorskip("peft")
from test_huggingface import Tokenizer, bert, bert_lora, gpt2, make_trainer, sentences, texts
from transformers import DataCollatorWithPadding, EarlyStoppingCallback, Trainer, TrainerCallback

from pages import ROOT
from privgrad.integrations.huggingface import PrivateTrainer
from privgrad.integrations.huggingface_models import classification_losses

Setup = Callable[[], dict[str, Any]]
ROWS = texts()
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "loss"}


def given(**arguments: Any) -> Setup:
    return lambda: {"arguments": arguments}


def options(**values: Any) -> Setup:
    return lambda: values


def redefining(**methods: Any) -> Setup:
    return lambda: {"kind": type("Mine", (PrivateTrainer,), methods), "optimizers": (None, None)}


def in_parts_of(size: int) -> Setup:
    return options(private_options={"microbatch_size": size})


def with_optimizer(make: Callable[[nn.Module], Any], **more: Any) -> Setup:
    def setup() -> dict[str, Any]:
        model = bert()
        return {"model": model, "optimizers": (make(model), None), **more}

    return setup


def smoothed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**batch).logits, batch["labels"], reduction="none", label_smoothing=0.1)


def of_one_number(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(**batch).logits[:, 0], batch["labels"].float(), reduction="none")


def renamed(model: Any) -> Any:
    model.__class__ = type("Regressor", (type(model),), {})
    return model


class MaxLength(Tokenizer):
    def save_pretrained(self, folder: str) -> None: ...

    def pad(self, items: list[dict[str, Any]], **_: Any) -> dict[str, Tensor]:
        return {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0]}


def relabeled(name: str, value: Callable[[int], Any]) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], name: value(row["label"])} for row in ROWS]


def with_adapters(*, first: bool) -> dict[str, Any]:
    model: Any = bert_lora() if first else bert()
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.01)
    if not first:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    return {"model": model, "optimizers": (optimizer, None)}


def experts(*, balanced: bool) -> dict[str, Any]:
    model: Any = gpt2()
    model.config.output_router_logits = balanced
    return {"model": model, "data": sentences()}


def private_adam(model: nn.Module) -> Any:
    return pg.optim.AdamBC(model.named_parameters(), noise_step=0.01)


def debiased(model: nn.Module) -> Any:
    return pg.optim.AdamWBC(model.named_parameters(), noise_step=0.01, debias_floor=8.0)


def made_by(make: Callable[[Any], Any]) -> Callable[..., Any]:
    def create_optimizer(self: Any, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = make(self.model)
        return self.optimizer

    return create_optimizer


def constant(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
    self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
    return self.lr_scheduler


def by_evaluations(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
    self.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer)
    return self.lr_scheduler


def unreachable(*_: Any, **__: Any) -> Any:
    raise AssertionError


class Other(Trainer): ...


class Listening(TrainerCallback): ...


class Case(NamedTuple):
    bad: Setup
    remedy: str  # part of the message, a pattern
    good: Setup


def off(name: str, value: Any, remedy: str = "", good: Setup | None = None, **more: Any) -> Case:
    """An argument that is to be set to its default, or to be replaced as the remedy says."""
    return Case(given(**{name: value}, **more), rf"set {name}=.*{remedy}", options() if good is None else good)


BATCHES = r"leave it out: the plan draws the batches \(data_collator changes rows, pg\.ClassRates the rates"
RATED = options(data=pg.ClassRates(ROWS, [row["label"] for row in ROWS], [0.3, 1.0]))
FOLLOWING = redefining(create_scheduler=by_evaluations)
OWN_ADAM = redefining(create_optimizer=made_by(private_adam))
CASES: dict[str, Case] = {
    "max_grad_norm": off("max_grad_norm", 0.5, "the plan clips each example to 1"),
    "max_steps": off("max_steps", 5, "the plan decides the number of steps"),
    "epochs": Case(
        given(max_steps=-1, num_train_epochs=2),
        "leave out num_train_epochs, or plan for steps=8",
        options(arguments={"max_steps": -1, "num_train_epochs": 2}, planned={"steps": 8}),
    ),
    "batch size": off("per_device_train_batch_size", 4, r"'microbatch_size': 4\}", in_parts_of(4)),
    "accumulation": off(
        "gradient_accumulation_steps",
        4,
        r"the plan's batch is one step, of per_.*'microbatch_size': 2\}",
        in_parts_of(2),
    ),
    "found size": off("auto_find_batch_size", True, r"'microbatch_size': 8\}", in_parts_of(8)),
    "emptied cache": off("torch_empty_cache_steps", 1, r"'microbatch_size': 8\}", in_parts_of(8)),
    "smoothing": off(
        "label_smoothing_factor",
        0.1,
        r"loss_fn may have F\.cross_entropy\(\.\.\., reduction='none', label_smoothing=0\.1\)",
        options(loss_fn=smoothed),
    ),
    "neftune": off("neftune_noise_alpha", 5.0, "privgrad has nothing in its place"),
    "adam_epsilon": off("adam_epsilon", 1e-3, "AdamWBC has debias_floor in its place", with_optimizer(debiased)),
    "torch_compile": off("torch_compile", True, "private_options={'compile': True} compiles the private step"),
    "liger": off("use_liger_kernel", True, "no gradients of single examples"),
    "jit checkpoint": off("enable_jit_checkpoint", True, "set save_steps", given(save_steps=1)),
    "fp16": off("fp16", True, "for mixed precision, set bf16=True", given(bf16=True)),
    "fsdp": off("fsdp", True, r"fit with PrivateGradient\(processes=Distributed\(\)\)"),
    "sampling": off("train_sampling_strategy", "sequential"),
    "skipping": off("ignore_data_skip", True),
    "tokens": off("include_num_input_tokens_seen", "all"),
    "memory": off("skip_memory_metrics", False),
    "debug": off("debug", "underflow_overflow"),
    "torch's optimizer": Case(
        with_optimizer(lambda model: torch.optim.Adam(model.parameters())),
        r"give optimizers=\(pg\.optim\.AdamBC\(model\.named_parameters\(\), noise_step=\.\.\.\), None\)",
        with_optimizer(private_adam),
    ),
    "two rates": Case(
        options(noise_step=0.01, optimizers=(None, None), arguments={"learning_rate": 0.1}),
        "leave out learning_rate or noise_step",
        options(noise_step=0.01, optimizers=(None, None)),
    ),
    "two optimizers": Case(
        with_optimizer(private_adam, noise_step=0.01), "leave out one of the two", with_optimizer(private_adam)
    ),
    "no noise": Case(
        options(optimizers=(None, None), planned={"noise_multiplier": 0.0}),
        "set learning_rate: there is no noise step",
        options(optimizers=(None, None), planned={"noise_multiplier": 0.0}, arguments={"learning_rate": 0.1}),
    ),
    "optim": Case(
        options(optimizers=(None, None), arguments={"optim": "sgd"}),
        r"give optimizers=\(an optimizer of pg\.optim, None\) in place of optim",
        with_optimizer(lambda model: pg.optim.SGD(model.named_parameters(), lr=0.1)),
    ),
    "adapters": Case(
        lambda: with_adapters(first=False),
        "create the optimizer from this model, after adapters are added to it",
        lambda: with_adapters(first=True),
    ),
    "early stopping": Case(
        options(eval_dataset=texts(8), arguments=EVALUATED, callbacks=[EarlyStoppingCallback()]),
        "give selection_data='public'",
        options(
            eval_dataset=texts(8),
            arguments=EVALUATED | {"load_best_model_at_end": True},
            callbacks=[EarlyStoppingCallback()],
            selection_data="public",
        ),
    ),
    "greedy rate": Case(
        options(eval_dataset=texts(8), arguments=EVALUATED | {"lr_scheduler_type": "greedy"}),
        "with GreedyLR; give selection_data='public'",
        options(eval_dataset=texts(8), arguments=EVALUATED | {"lr_scheduler_type": "greedy"}, selection_data="public"),
    ),
    "create_scheduler": Case(
        lambda: FOLLOWING() | {"eval_dataset": texts(8), "arguments": EVALUATED},
        "with ReduceLROnPlateau; give selection_data='public'",
        lambda: FOLLOWING() | {"eval_dataset": texts(8), "arguments": EVALUATED, "selection_data": "public"},
    ),
    "evaluation": Case(options(eval_dataset=ROWS), "evaluate other data", options(eval_dataset=texts(8))),
    "another trainer": Case(
        options(kind=type("Both", (PrivateTrainer, Other), {})), "derive from PrivateTrainer alone", options()
    ),
    "get_train_dataloader": Case(redefining(get_train_dataloader=unreachable), BATCHES, RATED),
    "_get_train_sampler": Case(redefining(_get_train_sampler=unreachable), BATCHES, RATED),
    "get_batch_samples": Case(redefining(get_batch_samples=unreachable), BATCHES, options()),
    "training_step": Case(
        redefining(training_step=unreachable),
        "give loss_fn for the loss, and a TrainerCallback",
        options(loss_fn=smoothed, callbacks=[Listening()]),
    ),
    "floating_point_ops": Case(redefining(floating_point_ops=unreachable), "leave it out", options()),
    "set_initial_training_values": Case(
        redefining(set_initial_training_values=unreachable), "leave it out: the plan decides the steps", options()
    ),
    "create_optimizer_and_scheduler": Case(
        redefining(create_optimizer_and_scheduler=unreachable),
        "redefine create_optimizer or create_scheduler in its place",
        redefining(create_optimizer=made_by(private_adam), create_scheduler=constant),
    ),
    "get_optimizer_cls_and_kwargs": Case(
        redefining(get_optimizer_cls_and_kwargs=staticmethod(unreachable)), "redefine create_optimizer", OWN_ADAM
    ),
    "create_optimizer": Case(
        redefining(create_optimizer=made_by(lambda model: torch.optim.AdamW(model.parameters()))),
        r"create it from privgrad\.optim with model\.named_parameters\(\)",
        OWN_ADAM,
    ),
    "a step of its own": Case(
        lambda: OWN_ADAM() | {"noise_step": 0.5}, "next to create_optimizer; leave out one of the two", OWN_ADAM
    ),
    "_inner_training_loop": Case(
        redefining(_inner_training_loop=unreachable),
        r"leave it out, or write a loop with pg\.PrivateGradient",
        options(),
    ),
    "a rate of zero": Case(
        with_optimizer(lambda model: pg.optim.SGD(model.named_parameters(), lr=0.0), planned={"steps": 11}),
        "raise the learning rate, keep parameters in float32, or freeze those",
        with_optimizer(lambda model: pg.optim.SGD(model.named_parameters(), lr=0.1), planned={"steps": 11}),
    ),
    "call_model_init": Case(redefining(call_model_init=unreachable), "give model in place of model_init", options()),
    "compute_loss": Case(
        redefining(compute_loss=unreachable),
        r"give loss_fn too: .* \(compute_loss is for evaluation only\)",
        lambda: {**redefining(compute_loss=unreachable)(), "loss_fn": smoothed},
    ),
    "model_init": Case(options(model_init=bert), "give model in place of model_init", options()),
    "compute_loss_func": Case(
        options(compute_loss_func=unreachable), "give loss_fn, which returns one loss per", options(loss_fn=smoothed)
    ),
    "optimizer_cls_and_kwargs": Case(
        options(optimizer_cls_and_kwargs=(torch.optim.SGD, {})), "give optimizers in", with_optimizer(private_adam)
    ),
    "clip": Case(
        options(clip=pg.clip.Automatic()),
        r"give private_options=\{'clip': \.\.\.\}",
        options(private_options={"clip": pg.clip.Automatic()}),
    ),
    "ledger": Case(
        options(private_options={"ledger": "mine"}),
        "give private_options among perturb, .*norm_bins",
        options(private_options={"norm_bins": "auto"}),
    ),
    "padding": Case(
        lambda: {"data_collator": DataCollatorWithPadding(cast(Any, Tokenizer()))},
        "padding='max_length' and a public max_length",
        lambda: {"data_collator": DataCollatorWithPadding(cast(Any, MaxLength()), padding="max_length", max_length=6)},
    ),
    "uneven rows": Case(
        options(data=[{"input_ids": [1] * (1 + row % 3), "label": 0} for row in range(32)]),
        r"pad each one: tokenizer\(texts, padding='max_length'",
        options(data=[{"input_ids": [1] * 3, "label": 0} for _ in range(32)]),
    ),
    "words": Case(
        options(data=relabeled("labels", ["no", "yes"].__getitem__)),
        r"labels of the example at index 0 to be .* from 0 to 1, got 'no', a str; .*number names by dataset",
        options(data=relabeled("labels", int)),
    ),
    "a column of another name": Case(
        options(data=relabeled("target", int)), "rename it", options(data=relabeled("labels", int))
    ),
    "fractions": Case(
        options(data=relabeled("labels", float)), "give the classes as integers", options(data=relabeled("labels", int))
    ),
    "a missing label": Case(
        options(data=relabeled("label", lambda label: label or None)),
        "correct it or leave it out",
        options(data=relabeled("label", int)),
    ),
    "a class of one's own": Case(
        lambda: {"model": renamed(bert(num_labels=1))},
        "give loss_fn",
        lambda: {"model": renamed(bert(num_labels=1)), "loss_fn": of_one_number},
    ),
    "experts": Case(
        lambda: experts(balanced=True),
        r"set model\.config\.output_router_logits = False",
        lambda: experts(balanced=False),
    ),
    "losses without an end": Case(
        options(loss_fn=lambda model, batch: classification_losses(model, batch) / 0, planned={"steps": 11}),
        r"the last 10 steps to have a gradient that counts, got 0; find the overflow, log\(0\) or 0 / 0 .*NOT PRIVATE",
        options(),
    ),
}


def trainer_of(folder: Path, setup: Setup) -> PrivateTrainer:
    found = setup()
    model, data = found.pop("model", None), found.pop("data", ROWS)
    planned = {"steps": 1, "delta": 1e-3} | found.pop("planned", {})
    return make_trainer(folder, bert() if model is None else model, data, planned=planned, **found)


@pytest.mark.filterwarnings("ignore:NOT PRIVATE", "ignore:The speedups for torchdynamo")
@pytest.mark.parametrize("name", CASES)
def test_a_refused_setup_trains_once_its_remedy_is_followed(tmp_path: Path, name: str):
    case = CASES[name]
    with pytest.raises(pg.PrivacyError, match=case.remedy):
        trainer_of(tmp_path / "bad", case.bad).train()
    trainer = trainer_of(tmp_path / "good", case.good)
    trainer.train()
    assert trainer.private_grad.ledger.releases == trainer.private_grad.plan.steps


@pytest.mark.parametrize("rows", [ROWS, ROWS[:4], Subset(cast(Any, ROWS), [1, 2])], ids=["all", "some", "a subset"])
def test_predictions_of_the_training_data_are_refused(tmp_path: Path, rows: Any):
    trainer = trainer_of(tmp_path, options())
    with pytest.raises(pg.PrivacyError, match="got test_dataset with rows of the training data; evaluate other data"):
        trainer.predict(rows)
    found = trainer.predict(cast(Any, texts(8)))
    assert len(cast(Any, found.predictions)) == 8


def test_a_loader_of_training_data_is_not_evaluated(tmp_path: Path):
    def loader(self: Any, eval_dataset: Any = None) -> Any:
        return torch.utils.data.DataLoader(cast(Any, ROWS), collate_fn=self.data_collator)

    trainer = trainer_of(tmp_path, redefining(get_eval_dataloader=loader))
    with pytest.raises(pg.PrivacyError, match="got eval_dataset with rows of the training data"):
        trainer.evaluate()


def test_words_of_a_dataset_are_encoded_as_the_remedy_says(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": row["input_ids"].tolist(), "label": ["no", "yes"][row["label"]]} for row in ROWS]
    data = datasets.Dataset.from_list(rows)
    with pytest.raises(pg.PrivacyError, match=r"by dataset\.class_encode_column\('label'\)"):
        trainer_of(tmp_path / "a", options(data=data)).train()
    trainer_of(tmp_path / "b", options(data=data.class_encode_column("label"))).train()


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(model(**batch).logits, batch["labels"], reduction="none")
    return torch.where(batch["labels"] == 1, 9 * losses, losses)


@pytest.mark.parametrize("metrics", [None, lambda found: {"rows": len(found.predictions)}], ids=["loss", "metrics"])
def test_an_evaluation_has_the_mean_of_the_loss_that_was_given(tmp_path: Path, metrics: Any):
    held_out: Any = texts(9)  # in batches of 8 and 1
    arguments = {"per_device_eval_batch_size": 8}
    values = {"eval_dataset": held_out, "compute_metrics": metrics, "arguments": arguments}
    trainer = trainer_of(tmp_path / "a", options(loss_fn=weighted, **values))
    batch = trainer.data_collator([{n: v for n, v in row.items() if n != "row"} for row in held_out])
    wanted = weighted(trainer.private_step.model.eval(), batch).mean().item()
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    assert found.get("eval_rows", 9) == 9
    own = trainer_of(tmp_path / "b", options(**values)).evaluate()["eval_loss"]
    assert own == pytest.approx(classification_losses(trainer.private_step.model, batch).mean().item(), rel=1e-5)
    assert own < wanted / 2


def test_persons_are_evaluated_by_the_loss_of_the_model(tmp_path: Path):
    """A row of the evaluation is one text, which the loss of a person does not take."""
    persons = [{name: torch.stack([value] * 2) for name, value in row.items() if name != "row"} for row in sentences()]

    def of_persons(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise AssertionError

    setup = options(
        data=persons,
        loss_fn=of_persons,
        planned={"privacy_unit": "user"},
        private_options={"perturb": pg.perturb.SampleGradient("user")},
        eval_dataset=texts(8),
    )
    assert trainer_of(tmp_path, setup).evaluate()["eval_loss"] > 0


def test_gradients_that_are_not_finite_are_told_at_the_first_step(tmp_path: Path):
    def one_in_two(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return classification_losses(model, batch) * torch.where(batch["labels"] == 1, torch.inf, 1.0)

    told = r"NOT PRIVATE: PrivateTrainer: step \d+: gradients were not finite, and count as zero; do not publish"
    trainer = trainer_of(tmp_path / "some", options(loss_fn=one_in_two, planned={"steps": 12}))
    with pytest.warns(UserWarning, match=told) as caught:
        trainer.train()  # to its end: some gradients of each batch were finite
    assert len([one for one in caught if "were not finite" in str(one.message)]) == 1
    assert trainer.private_grad.ledger.releases == 12
    nothing = trainer_of(
        tmp_path / "all", options(loss_fn=lambda model, batch: one_in_two(model, batch) / 0, planned={"steps": 12})
    )
    with pytest.warns(UserWarning, match=told), pytest.raises(pg.PrivacyError, match="the last 10 steps"):
        nothing.train()
    assert nothing.private_grad.ledger.releases == 10


def test_own_optimizers_are_made_once_and_step(tmp_path: Path):
    made = list[Any]()

    def create_optimizer(self: Any, model: Any = None) -> Any:
        made.append(pg.optim.SGD(self.model.named_parameters(), lr=0.1))  # another one at each call
        self.optimizer = made[-1]

    trainer = trainer_of(tmp_path, lambda: redefining(create_optimizer=create_optimizer)() | {"planned": {"steps": 3}})
    trainer.train()
    assert len(made) == 1
    assert trainer.private_step.optimizer is made[0]
    assert trainer.state.global_step == trainer.private_grad.ledger.releases == 3


@pytest.mark.slow
def test_worker_processes_may_start_in_another_way(tmp_path: Path):
    workers = {"dataloader_num_workers": 1}
    context: Any = {"dataloader_multiprocessing_context": "forkserver"}
    with pytest.raises(pg.PrivacyError, match=r"call torch\.multiprocessing\.set_start_method in its place"):
        trainer_of(tmp_path / "a", given(**workers, **context))
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method("forkserver", force=True)
    try:
        trainer = trainer_of(tmp_path / "b", given(**workers))
        trainer.train()
    finally:
        torch.multiprocessing.set_start_method(before, force=True)
    assert trainer.private_grad.ledger.releases == 1


TWO_PROCESSES = """
import sys, torch
from transformers import TrainingArguments
from test_huggingface import bert, make_plan, texts
from privgrad.integrations.huggingface import PrivateTrainer
args = TrainingArguments(sys.argv[1], report_to=[], use_cpu=True)
PrivateTrainer(bert(), args, plan=make_plan(steps=1), train_dataset=texts())
"""


@pytest.mark.slow
def test_several_processes_are_sent_to_fit(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = ":".join(str(ROOT / part) for part in ("src", "", "tests", "tests/integrations"))
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    ended = subprocess.run(
        [*launch, str(script), str(tmp_path / "run")], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode
    assert (
        "got world_size=2; start one process with CUDA_VISIBLE_DEVICES=0; several devices need fit with "
        "PrivateGradient(processes=Distributed())."
    ) in ended.stderr
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
