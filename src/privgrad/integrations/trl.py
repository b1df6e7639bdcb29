"""TRL's trainers of language models with the private step: one loss per example, or per pair of answers."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from transformers import Trainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from privgrad.data.dataset import by_user
from privgrad.data.schema import ROW, require_unit
from privgrad.errors import SamplingError, expected
from privgrad.gradient.contribution import SampleGradient
from privgrad.integrations import huggingface_arguments as arguments
from privgrad.integrations import huggingface_models as models
from privgrad.integrations.huggingface import PrivateTrainer
from privgrad.plan import PrivacyPlan
from privgrad.sampling.loading import Collate
from privgrad.training.external_loop import Conflict, changed_values, refuse

_ROWS = ("input_ids", "attention_mask", "completion_mask")  # TRL stacks all chosen answers on all rejected ones
_PACKING = "a packed row holds texts of several examples; give a small max_length, which is the public length of a row"
_GENERATE = {"LogCompletionsCallback", "WeaveCallback"}  # TRL's, which generate from the rows of eval_dataset
_MIXES = "it does not give one loss per example"
_PAIRS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {  # (ratios, counts, beta) of pairs, (B, 2) -> (B,)
    "sigmoid": lambda ratios, _, beta: -F.logsigmoid(beta * (ratios[:, 0] - ratios[:, 1])),
    "hinge": lambda ratios, _, beta: F.relu(1 - beta * (ratios[:, 0] - ratios[:, 1])),
    "ipo": lambda ratios, counts, beta: (
        (ratios / counts).mul(ratios.new_tensor([1, -1])).sum(1) - 0.5 / beta
    ).square(),
}


class _PrivateTRL(PrivateTrainer):
    """The base of both trainers: public lengths, and what TRL prepares."""

    _default_collator: ClassVar[Any] = None  # TRL makes its own
    _config: ClassVar[type[Any]]

    def __init__(
        self, model: Any, args: Any, *, train_dataset: Any, unit: str = ROW, max_rows: int | None = None, **options: Any
    ) -> None:
        name = type(self).__name__
        require_unit(name, unit, max_rows)
        if not isinstance(args, self._config):
            kind = self._config.__name__
            raise expected(name, "args", f"to be a {kind}", type(args).__name__, f"give trl.{kind}(output_dir)")
        if not isinstance(train_dataset, Dataset):
            remedy = "give datasets.Dataset.from_list([...]): a stream has no known sampling rate"
            raise expected(name, "train_dataset", "to be a datasets.Dataset", type(train_dataset).__name__, remedy)
        if isinstance(model, nn.Module):
            _require_causal(name, model)
        self._given, self._unit, self._max_rows = train_dataset, unit, max_rows
        self._given_options = options.get("private_options") or {}
        if unit != ROW:
            self._privacy_unit = "user"
            options["private_options"] = {"perturb": SampleGradient("user", max_rows, unit)} | self._given_options
        super().__init__(model, args, train_dataset=train_dataset, head_first=False, **options)

    def _send_telemetry(self) -> None:
        """Send nothing: TRL would report the model's type and the kind of the data's source."""

    def _host_conflicts(self, args: Any, plan: PrivacyPlan) -> Iterator[Conflict]:
        if plan.privacy_unit != self._privacy_unit:
            remedy = 'for persons, give unit (a column), max_rows and PrivacyPlan(privacy_unit="user")'
            yield Conflict(f"privacy_unit={plan.privacy_unit!r} with unit={self._unit!r}", remedy)
        if self._unit not in (ROW, *self._given.column_names):
            yield Conflict(f"unit={self._unit!r}", f"name one of {', '.join(self._given.column_names)}")
        if self._unit != ROW and self._given_options.get("perturb"):
            yield Conflict("perturb in private_options", "leave it out: unit and max_rows decide it for persons")
        if args.max_length is None:
            yield Conflict("max_length=None", "give a public max_length: each row is cut or padded to it")
        if (args.gradient_checkpointing_kwargs or {}).get("selective"):
            yield Conflict("gradient_checkpointing_kwargs with selective", "leave it out; gradient_checkpointing stays")
        args.pad_to_multiple_of = args.pad_to_multiple_of or args.max_length
        yield from changed_values(
            args,
            {
                "pad_to_multiple_of": (args.max_length, "the length of a row is public, and not that of the longest"),
                "packing": (False, _PACKING),
                "padding_free": (False, _PACKING),
                "activation_offloading": (False, "gradient_checkpointing=True saves memory"),
            },
        )

    def _make_ready(self, model: nn.Module) -> None:
        _require_causal(type(self).__name__, model)
        _keep_unpacked(model)
        if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
            for parameter in model.parameters():
                if parameter.requires_grad:  # TRL has made it bfloat16, where small updates are lost
                    parameter.data = parameter.data.float()
        self._require_rows(self.train_dataset)
        if self._unit != ROW:
            self._losses = partial(_person_losses, self._losses)

    def _examples(self) -> tuple[Any, Collate]:
        rows, collate = super()._examples()
        if self._max_rows is None:
            return rows, collate
        # By their own content: by place, one person more or less could change which rows of the others are kept.
        digests = [hashlib.sha256(repr(row).encode()).digest() for row in rows.with_format(None)]
        order, names = sorted(range(len(rows)), key=digests.__getitem__), list(rows[self._unit])
        places = by_user((torch.tensor(order),), [names[place] for place in order], cap=self._max_rows)
        return places, _OfPersons(rows, collate)

    def _say_and_start(self, *, is_resumed: bool) -> None:
        super()._say_and_start(is_resumed=is_resumed)
        for name in {type(one).__name__ for one in cast("list[object]", self.callback_handler.callbacks)} & _GENERATE:
            told = f"{name} shows what the model makes of the prompts of eval_dataset, without noise"
            arguments.tell(f"{told}: epsilon does not cover them. Take public prompts.")

    def _require_rows(self, rows: Any) -> None:
        """Raise SamplingError (NOT private) for no rows, padding with labels, or a row above the public length."""
        name, longest = type(self).__name__, cast(Any, self.args).max_length
        if not len(rows):
            got, remedy = "0 of them", "raise max_length: prompts fill it, and TRL drops such rows"
            raise expected(name, "train_dataset", "to keep rows with tokens to learn", got, remedy, SamplingError)
        if "input_ids" in rows.column_names and max(map(len, rows["input_ids"])) > longest:
            condition, remedy = f"to have at most max_length={longest} tokens in a row", "cut the rows, or raise it"
            raise expected(name, "train_dataset", condition, "a longer one", remedy, SamplingError)
        columns = cast("dict[str, list[list[int]]]", self._given.with_format(None))
        if {"input_ids", "attention_mask"} <= set(self._given.column_names):
            labels = columns["labels" if "labels" in self._given.column_names else "input_ids"]
            for mask, row in zip(columns["attention_mask"], labels, strict=True):
                if 0 in mask and any(label != models.IGNORED for label, own in zip(row, mask, strict=True) if not own):
                    got, remedy = "an attention_mask of 0 without label -100", "give rows without padding: TRL pads"
                    raise expected(name, "train_dataset", "to have no padding to learn", got, remedy, SamplingError)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as TRL does; refuse the training data, which TRL would copy first."""
        refuse(type(self).__name__, arguments.evaluation_conflicts(self._given, eval_dataset))
        return super().evaluate(eval_dataset, *args, **kwargs)


class PrivateSFTTrainer(_PrivateTRL, SFTTrainer):
    """TRL's SFTTrainer with the private step: an example is one row, and its loss the mean over its own tokens.

    Texts, chats, prompts with completions, `formatting_func`, `peft_config` and `quantization_config` are TRL's. Each
    row is padded to the public SFTConfig.max_length; longer rows are cut. TRL sends no telemetry.

    Args:
        model: a causal language model of transformers, or its name.
        args: an SFTConfig without packing. Choose max_length: its default, 1,024, is slow for short texts.
        train_dataset: the private examples, a datasets.Dataset.
        unit: "row" protects each row by itself. The name of a column that identifies a person protects all rows of a
            person together: the example is then the person, num_examples and batches count persons, and the loss is
            the mean over the person's rows. A plan needs privacy_unit="user".
        max_rows: for persons: the most rows of a person, a public number. Of more, their content decides which are
            used. Each step takes the time of so many rows for every person.
        options: those of PrivateTrainer, such as target_epsilon, delta and num_examples, and those of SFTTrainer.
    Raises:
        PrivacyError: as PrivateTrainer; for packing, rows without padding, or losses that mix examples.
        SamplingError: no row has a token to learn, or prepared rows are longer than max_length.
    Privacy:
        That of PrivateTrainer, for one row of train_dataset, or one person. A callback that generates texts shows what
        the model makes of its prompts, without noise: give it public prompts. `eval_dataset` with the training rows is
        refused; what a callback holds by itself cannot be seen.
    """

    _hosts: ClassVar[tuple[type[Trainer], ...]] = (SFTTrainer,)
    _config: ClassVar[type[Any]] = SFTConfig

    def _default_losses(self, model: nn.Module) -> models.Losses:
        return models.causal_lm_losses

    def _host_conflicts(self, args: Any, plan: PrivacyPlan) -> Iterator[Conflict]:
        yield from super()._host_conflicts(args, plan)
        if args.completion_only_loss and not {"completion", "completion_mask", "labels"} & {*self._given.column_names}:
            yield Conflict("completion_only_loss=True without completions", "give columns prompt and completion")
        remedy = "give loss_fn, (model, batch) -> losses of shape (B,), for another one"
        yield from changed_values(args, {"loss_type": ("nll", remedy)})


class PrivateDPOTrainer(_PrivateTRL, DPOTrainer):
    """TRL's DPOTrainer with the private step: an example is a pair of a chosen and a rejected answer, with one loss.

    The log-probabilities of the reference are computed once, before the training, without gradients; with adapters,
    the reference is the model without them. Each answer with its prompt is padded to DPOConfig.max_length.

    Args:
        model: as in PrivateSFTTrainer.
        args: a DPOConfig whose loss_type is "sigmoid", "hinge" or "ipo".
        train_dataset: the private pairs, a datasets.Dataset.
        unit, max_rows: as in PrivateSFTTrainer.
        options: those of PrivateTrainer, such as target_epsilon, delta and num_examples, and those of DPOTrainer.
    Raises:
        PrivacyError: as in PrivateSFTTrainer; also for a loss that needs other pairs.
    Privacy:
        That of PrivateTrainer, for one pair; for all pairs of one person with unit and max_rows.
    """

    _hosts: ClassVar[tuple[type[Trainer], ...]] = (DPOTrainer,)
    _config: ClassVar[type[Any]] = DPOConfig

    def _host_conflicts(self, args: Any, plan: PrivacyPlan) -> Iterator[Conflict]:
        yield from super()._host_conflicts(args, plan)
        args.precompute_ref_log_probs = True
        args.precompute_ref_batch_size = args.precompute_ref_batch_size or args.per_device_eval_batch_size
        if len(args.loss_type) != 1 or args.loss_type[0] not in _PAIRS:
            remedy = f"give one of {', '.join(map(repr, _PAIRS))}, or loss_fn: others may need several pairs"
            yield Conflict(f"loss_type={args.loss_type!r}", remedy)
        yield from changed_values(
            args,
            {
                "loss_weights": (None, ""),
                "ld_alpha": (None, _MIXES),
                "use_weighting": (False, ""),
                "f_divergence_type": ("reverse_kl", ""),
                "sync_ref_model": (False, "the reference is computed once"),
            },
        )

    def _default_losses(self, model: nn.Module) -> models.Losses:
        return self._pair_losses

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        _keep_unpacked(cast(nn.Module, self.model))
        if name == "train":
            self._require_rows(dataset)
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def _train_collate(self) -> Collate:
        return _Pairs(super()._train_collate())

    def _pair_losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the loss of each pair, shape (B,), from the sums of log-probabilities over its own tokens."""
        ids, mask, own = (batch[name].flatten(0, 1) for name in _ROWS)
        labels = ids.masked_fill(own == 0, models.IGNORED)
        losses, _ = models.next_token_losses(model(input_ids=ids, attention_mask=mask).logits, labels)
        ratios: Tensor = -losses.reshape(-1, 2) - batch["ref_logps"]
        counts = batch["completion_mask"].sum(2).clamp(min=1)
        return _PAIRS[cast(Any, self.args).loss_type[0]](ratios, counts, self.beta)


def _require_causal(function: str, model: nn.Module) -> None:
    """Raise PrivacyError unless a model is a causal language model whose losses do not mix examples."""
    if models.losses_of(model) is not models.causal_lm_losses:
        remedy = "train other models by PrivateTrainer, as docs/hugging-face.md shows"
        got = type(models.base_of(model)).__name__
        raise expected(function, "model", "to be a causal language model", got, remedy)


def _keep_unpacked(model: nn.Module) -> None:
    """Keep a base of 4 bits from packing itself when it evaluates on a processor: no gradient passes it then."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            cast(Any, module).support_avx512bf16_for_cpu = False


class _Pairs:
    """The columns of pairs: (B, 2, length), and the log-probabilities of the reference, (B, 2)."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> dict[str, Tensor]:
        columns = self._collate(items)
        pairs = {name: columns[name].unflatten(0, (2, -1)).transpose(0, 1).contiguous() for name in _ROWS}
        reference = [columns[f"ref_{name}_logps"] for name in ("chosen", "rejected")]

        return pairs | {"ref_logps": torch.stack(reference, 1).float()}


class _OfPersons:
    """The columns of persons, (B, max_rows, ...), and the mask of their own rows; others are copies."""

    def __init__(self, rows: Dataset, collate: Collate) -> None:
        self._rows, self._collate = rows, collate

    def __call__(self, items: list[Any]) -> dict[str, Tensor]:
        places, counts = (torch.stack(part) for part in zip(*items, strict=True))
        columns = self._collate([self._rows[place] for place in cast("list[int]", places.flatten().tolist())])
        persons = {name: part.unflatten(0, (len(places), -1)) for name, part in columns.items()}
        return persons | {"own": torch.arange(places.shape[1]) < counts[:, None]}


def _person_losses(row_losses: models.Losses, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the mean of the losses of each person's own rows, shape (B,)."""
    own = batch["own"]
    rows = {name: part.flatten(0, 1) for name, part in batch.items() if name != "own"}
    return (row_losses(model, rows).view(own.shape) * own).sum(1) / own.sum(1)
