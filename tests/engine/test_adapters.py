"""Adapters on a frozen base, of 4 or 8 bits too, and gradient checkpointing of transformers."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from benchmarks.counting import Counts, operations_of
from benchmarks.lora import OnFrozen
from conftest import make_plan
from privgrad.engine.factored import Factored
from privgrad.gradient.factor import Factor

IDS: Any = torch.randint(64, (5, 8), generator=torch.Generator().manual_seed(2))
ROWS: Any = torch.randn(8, 5, generator=torch.Generator().manual_seed(3))
ALL = {"sample_rate": 1.0, "expected_batch_size": 5, "num_examples": 5}


class Adapted(nn.Module):
    """A frozen weight of any size between trained ones of one size."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, width, bias=False, dtype=dtype), nn.Linear(width, 4, bias=False, dtype=dtype)
        self.base = nn.Linear(width, width, bias=False, dtype=dtype)
        for part in (self.up, self.base, self.down):
            part.requires_grad_(False)
        self.a, self.b = nn.Linear(4, 2, dtype=dtype), nn.Linear(2, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.down(self.base(self.up(x.to(self.a.weight.dtype))))).tanh())


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum(1)


def steps(model: nn.Module, number: int) -> list[tuple[int, int]]:
    """What each of the first steps reads of frozen weights and makes of them."""
    plan, found = make_plan(sample_rate=1.0, expected_batch_size=8, num_examples=8), []
    private_grad = pg.PrivateGradient(model, squares, plan)
    for _, batch in zip(range(number), plan.batches(ROWS), strict=False):
        with OnFrozen(model) as frozen:
            private_grad(batch)
        found.append((frozen.read, frozen.made))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_step_grows_with_frozen_weights(dtype: torch.dtype):
    torch.manual_seed(0)
    small, large = (steps(Adapted(width, dtype), 5) for width in (512, 1024))
    assert small[2] == large[2] == small[4] == large[4]  # neither of the first step, nor checked
    if dtype == torch.float32:  # losses are compared in float32 too: there a product has a copy of the weight
        assert all(of_large[1] <= of_small[1] for of_small, of_large in zip(small, large, strict=True))
    model = Adapted(512)
    with OnFrozen(model) as frozen:
        model.base.weight.detach().clone()
    assert (frozen.read, frozen.made) == (512**2, 4 * 512**2)


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_a_write_to_a_few_rows_of_a_large_frozen_weight_is_refused(engine: Any):
    torch.manual_seed(0)
    model, plan = Adapted(512), make_plan(sample_rate=1.0, expected_batch_size=8, num_examples=8)
    private_grad, batches = pg.PrivateGradient(model, squares, plan, engine=engine), plan.batches(ROWS)
    for _ in range(4):
        private_grad(next(batches))

    def write(module: Any, _: object) -> None:
        module.weight.data[7:12] += 1

    model.base.register_forward_pre_hook(write)
    with pytest.raises(pg.UnsupportedModuleError, match=r"parameters not to be written.*got base\.weight"):
        private_grad(next(batches))


def next_words(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **rates, num_hidden_layers=3, num_attention_heads=2)
    return transformers.BertForMaskedLM(config)


def with_lora(base: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first: lora_A would have no gradient
            nn.init.normal_(parameter, std=0.1)
    return model


def quantized(folder: Path, **options: Any) -> nn.Module:
    """A small Llama with LoRA, whose base has few bits, as transformers loads it."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    transformers = pytest.importorskip("transformers")
    llama().save_pretrained(folder)
    config = transformers.BitsAndBytesConfig(**options)
    kind, place = transformers.LlamaForCausalLM, {"device_map": "cpu", "dtype": torch.float32}
    return with_lora(kind.from_pretrained(folder, quantization_config=config, **place)).train()


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
BITS: dict[str, tuple[dict[str, Any], bool]] = {  # the options, and whether the model is in training mode
    "4, nested": (NF4, True),
    "4": ({"load_in_4bit": True}, True),
    "8": ({"load_in_8bit": True}, True),
    "8, inputs of 8 bits": ({"load_in_8bit": True, "llm_int8_threshold": 0.0}, False),
}


@pytest.mark.parametrize("case", BITS)
def test_adapters_on_a_quantized_base_have_the_gradients_of_single_examples(case: str, tmp_path: Path):
    options, training = BITS[case]
    model = quantized(tmp_path, **options).train(training)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    single = [torch.autograd.grad(next_words(model, one).sum(), list(parameters.values())) for one in IDS.split(1)]
    rows = {name: torch.stack(grads) for name, *grads in zip(parameters, *single, strict=True)}
    engine = Factored(model, next_words)
    for _ in range(2):
        found = engine(IDS)
        assert found.keys() == rows.keys()
        for name, factor in found.items():
            assert float((factor.dense() - rows[name]).norm()) <= 1e-5 * float(rows[name].norm())
    assert {use.way for use in engine.uses().values()} == {"rule"}
    private_grad = pg.PrivateGradient(model, next_words, plan := make_plan(**ALL))
    assert private_grad(next(iter(plan.batches(IDS)))).keys() == rows.keys()


def test_eight_bits_with_outliers_of_all_examples_are_refused(tmp_path: Path):
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    x, changes = torch.randn(4, 3, 64).clamp(-2, 2), list[float]()
    for threshold in (3.0, 0.0):
        layer = bnb.nn.Linear8bitLt(64, 8, has_fp16_weights=False, threshold=threshold).to("cpu").eval()
        one, other = layer(x), layer(x * torch.tensor([1.0, 10.0, 1.0, 1.0]).view(-1, 1, 1))
        changes.append(float((one[0] - other[0]).detach().abs().max()))
    assert changes[0] > 1e-4  # the second example has moved the first one's output
    assert changes[1] == 0.0
    model = quantized(tmp_path, load_in_8bit=True).eval()
    with pytest.raises(pg.UnsupportedModuleError, match=r"Linear8bitLt at .*llm_int8_threshold=0\.0"):
        pg.PrivateGradient(model, next_words, make_plan())


def test_weights_that_are_rounded_in_each_pass_are_refused():
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    with pytest.raises(pg.UnsupportedModuleError, match=r"rounds to 8 bits.*has_fp16_weights=False"):
        pg.PrivateGradient(bnb.nn.Linear8bitLt(64, 8), squares, make_plan())


@pytest.mark.filterwarnings("ignore:.*changed between two steps")
def test_weights_that_an_evaluation_packs_are_refused_until_they_are_unpacked(tmp_path: Path):
    """As bitsandbytes does on processors with AVX512-BF16: then no gradient passes, in ordinary training too."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = quantized(tmp_path, **NF4)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    if not layers[0].support_avx512bf16_for_cpu:
        pytest.skip("this processor has no AVX512-BF16")
    refused = partial(pytest.raises, pg.UnsupportedModuleError, match="packs its 4 bits.*state_dict.. unpacks")
    plan = make_plan(**ALL)
    private_grad, batches = pg.PrivateGradient(model, next_words, plan), plan.batches(IDS)
    private_grad(next(batches))
    with torch.no_grad():
        next_words(model.eval(), IDS)
    for _ in range(2):
        with refused():
            private_grad(next(batches))
        model.train()
    model.state_dict()
    private_grad(next(batches))
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        next_words(model.eval(), IDS)
    private_grad(next(batches))


def third(model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """The gradients of a pass that is not checked, and the most memory that it takes."""
    engine, counts, found = Factored(model, next_words), Counts(), dict[str, Factor]()
    ids = IDS.repeat(3, 8)
    for _ in range(2):
        engine(ids)
    operations_of(lambda: found.update(engine(ids)), counts)
    return {name: factor.dense() for name, factor in found.items()}, counts.peak


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": llama,
    "Llama with LoRA": lambda: with_lora(llama()),
    "BERT": bert,
    "BERT with LoRA": lambda: with_lora(bert()),
}


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_of_transformers_is_exact(name: str):
    model: Any = MODELS[name]().train()
    plain, before = third(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, on names of settings
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found, after = third(model)
    for key, grads in found.items():
        torch.testing.assert_close(grads, plain[key], rtol=1e-5, atol=1e-7)
    assert after < 1.1 * before  # the engine keeps the inputs of layers until it knows the norms


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("name", MODELS)
def test_reentrant_checkpointing_of_transformers_has_a_remedy(name: str, engine: Any):
    model: Any = MODELS[name]().train()
    plan = make_plan(**ALL)
    private_grad, batches = pg.PrivateGradient(model, next_words, plan, engine=engine), plan.batches(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that no input has a gradient
        for inputs in (False, True):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            if inputs:
                model.enable_input_require_grads()
            with pytest.raises(pg.PrivacyError, match=r"use_reentrant.*False"):
                private_grad(next(batches))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        private_grad(next(batches))
    assert private_grad.ledger.releases == 1
