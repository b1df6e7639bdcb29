"""The losses that PrivateTrainer takes for each task: each is the model's own, for each example by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import privgrad as pg
from conftest import make_plan

transformers = pytest.importorskip("transformers")
models = pytest.importorskip("privgrad.integrations.huggingface_models")
WIDTHS = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = torch.randint(2, 20, (32, 6), generator=torch.Generator().manual_seed(0))


def bert(kind: str, **options: Any) -> nn.Module:
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=6, **WIDTHS, **DROPOUT, **options)
    return getattr(transformers, kind)(config).double()


def t5() -> nn.Module:
    options = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**options, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).double()


def vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **WIDTHS, **DROPOUT)
    return transformers.ViTForImageClassification(config).double()


TAGS = IDS % 3
PLACES = {"start_positions": IDS[:, 0] % 6, "end_positions": IDS[:, 1] % 6}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "tags of tokens": (lambda: bert("BertForTokenClassification", num_labels=3), {"input_ids": IDS, "labels": TAGS}),
    "masked language model": (lambda: bert("BertForMaskedLM"), {"input_ids": IDS, "labels": IDS}),
    "sequence to sequence (T5)": (t5, {"input_ids": IDS, "labels": IDS[:, :4].contiguous()}),
    "question answering": (lambda: bert("BertForQuestionAnswering"), {"input_ids": IDS, **PLACES}),
    "several labels": (
        lambda: bert("BertForSequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        {"input_ids": IDS, "labels": (TAGS[:, :3] > 0).double().contiguous()},
    ),
    "regression": (
        lambda: bert("BertForSequenceClassification", num_labels=1),
        {"input_ids": IDS, "labels": TAGS[:, 0].double()},
    ),
    "several numbers": (
        lambda: bert("BertForSequenceClassification", num_labels=3, problem_type="regression"),
        {"input_ids": IDS, "labels": TAGS[:, :3].double().contiguous()},
    ),
    "images (ViT)": (vit, {"pixel_values": torch.randn(32, 3, 8, 8).double(), "labels": TAGS[:, 0]}),
}


class Rows(Dataset[Any]):
    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def test_every_task_is_tried():
    tried = {models.losses_of(make()) for make, _ in CASES.values()}
    assert tried | {models.causal_lm_losses} == set(models._LOSSES.values())


def test_a_model_without_a_known_loss_is_refused_by_name():
    with pytest.raises(pg.PrivacyError, match=r"got BertForMultipleChoice; give loss_fn"):
        models.losses_of(bert("BertForMultipleChoice"))


@pytest.mark.filterwarnings("ignore:privgrad computes", "ignore:.*each example by itself")
@pytest.mark.parametrize("task", CASES)
def test_the_loss_of_a_task_is_the_models_own_for_each_example(task: str):
    make, columns = CASES[task]
    torch.manual_seed(0)
    model = make()
    loss_fn = models.losses_of(model)
    pg.freeze_unused(model, loss_fn, {name: column[:4] for name, column in columns.items()})
    model.train()
    batch = {name: column[:1] for name, column in columns.items()}
    own = loss_fn(model, batch)
    assert torch.allclose(own.double(), model(**batch).loss, rtol=0, atol=1e-6)
    plan = make_plan(steps=2)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    assert sum(len(private_grad(batch)) > 0 for batch in plan.batches(Rows(columns))) == 2
