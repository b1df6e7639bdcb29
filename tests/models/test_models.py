"""Architectures by their published sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import privgrad as pg
import privgrad.features as ft
from privgrad import models


@pytest.mark.parametrize(("channels", "size", "parameters"), [(3, 32, 411_466), (1, 28, 410_890)])
def test_cnn5_has_the_papers_size(channels: int, size: int, parameters: int):
    model = models.cnn5(in_channels=channels, num_classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model[:-2](torch.zeros(2, channels, size, size)).shape == (2, 10, 3, 3)
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)


def test_the_autoencoder_has_the_papers_size():
    model = models.autoencoder(in_features=784)
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_837_314
    found = model(torch.rand(2, 1, 28, 28)).detach()
    assert found.shape == (2, 784)
    assert 0 < float(found.min()) <= float(found.max()) < 1
    assert sum(isinstance(layer, nn.Sigmoid) for layer in model) == 7


def test_mlp_and_activations():
    for activation in ("tanh", "relu", "leaky_relu"):
        options: dict[str, Any] = {"activation": activation}
        assert models.mlp(in_features=64, hidden=5, num_classes=3, **options)(torch.zeros(2, 8, 8)).shape == (2, 3)
    deep = models.mlp(in_features=64, hidden=5, num_classes=3, depth=4)
    assert [layer.in_features for layer in deep if isinstance(layer, nn.Linear)] == [64, 5, 5, 5, 5]
    with pytest.raises(pg.PrivacyError, match="tanh"):
        models.mlp(in_features=1, hidden=1, num_classes=1, activation="sine")  # pyright: ignore[reportArgumentType]


def test_cnn2_has_its_size_and_a_bag_of_words_counts():
    model = models.cnn2(in_channels=1, num_classes=330)
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_698_262
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 330)
    bag = models.bag_of_words(vocabulary=6, num_classes=3)
    nn.init.normal_(bag.weight)
    found = bag(torch.tensor([[1, 2, 2, 0], [0, 0, 0, 0]]))
    torch.testing.assert_close(found[0], (bag.weight[1] + 2 * bag.weight[2]) / 3)
    assert torch.equal(found[1], torch.zeros(3))


def test_the_language_model_does_not_see_ahead():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = models.LanguageModel(num_tokens=11, length=6, width=8).eval()
    ids = torch.randint(0, 11, (2, 6))
    changed = ids.clone()
    changed[:, 4] = (ids[:, 4] + 1) % 11
    before, after = model(ids), model(changed)
    assert before.shape == (2, 6, 11)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4], after[:, 4])


def test_the_head_of_a_pretrained_language_model_is_trained_alone(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    saved = transformers.GPT2LMHeadModel(config).eval()
    saved.save_pretrained(tmp_path)
    model = models.HeadLanguageModel(str(tmp_path)).eval()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [tuple(p.shape) for p in trained.values()] == [(11, 8)]
    ids = torch.randint(0, 11, (2, 6))
    before = model(ids)
    torch.testing.assert_close(before, saved(ids).logits)
    with torch.no_grad():
        next(iter(trained.values())).zero_()  # the embeddings stay
    assert not model(ids).any()
    assert model.language.get_input_embeddings().weight.any()
    with pytest.raises(pg.PrivacyError, match=r"HeadLanguageModel: expected path to hold a model"):
        models.HeadLanguageModel(str(tmp_path / "absent"))


def save_encoder(folder: Path, vocabulary: int = 20) -> Any:
    """Save a small encoder with random weights, and return it. Its padding is id 0."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=vocabulary, **sizes, **dropout)
    saved = transformers.BertModel(config)
    saved.save_pretrained(folder)
    return saved


def test_a_pair_classifier_trains_its_last_layer_anew_and_does_not_see_padding(tmp_path: Path):
    saved = save_encoder(tmp_path)
    model = models.PairClassifier(str(tmp_path), num_classes=3).eval()
    trained = {name.split(".")[0] + "." + name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"encoder.encoder", "encoder.pooler", "head.weight", "head.bias"}
    layers = {name.split(".")[3] for name, p in model.named_parameters() if p.requires_grad and ".layer." in name}
    assert layers == {"2"}
    old, new = saved.state_dict(), model.encoder.state_dict()
    same = {name for name in old if torch.equal(old[name], new[name])}
    assert "encoder.layer.1.output.dense.weight" in same
    assert "encoder.layer.2.output.dense.weight" not in same
    assert model.head.weight.std().item() < 0.1  # BERT's 0.02
    wide = models.PairClassifier(str(tmp_path), num_classes=3, std=1.0)
    new = [wide.head.weight, wide.encoder.pooler.dense.weight, wide.encoder.encoder.layer[2].output.dense.weight]
    assert 0.8 < torch.cat([weight.flatten() for weight in new]).std().item() < 1.2
    assert torch.equal(wide.encoder.encoder.layer[1].output.dense.weight, old["encoder.layer.1.output.dense.weight"])
    ids = torch.randint(1, 20, (2, 1, 5))
    short = torch.cat([ids, torch.zeros_like(ids)], 1)
    long = torch.cat([short, torch.zeros(2, 2, 4, dtype=torch.int64)], 2)
    torch.testing.assert_close(model(short), model(long))
    with pytest.raises(pg.PrivacyError, match="to hold an encoder"):
        models.PairClassifier(str(tmp_path / "absent"), num_classes=3)


def test_a_pair_classifier_takes_the_states_of_its_frozen_layers(tmp_path: Path):
    save_encoder(tmp_path)
    ids = torch.randint(1, 20, (6, 1, 9))
    ids[1, :, 5:] = 0
    ids[4, :, 2:] = 0
    pairs = torch.cat([ids, torch.randint(0, 2, ids.shape)], 1)
    states = ft.Frozen(models.LowerLayers(str(tmp_path)), name="lower layers", source="random weights")(pairs)
    assert states.shape == (6, 9 * 8)
    assert not states.view(6, 9, 8)[1, 5:].any()
    model = models.PairClassifier(str(tmp_path), num_classes=3).eval().double()
    torch.testing.assert_close(model(states.double()), model(pairs), atol=1e-6, rtol=0)
    other = states.clone().double()
    other[0] = 0  # another row, all of it padding
    torch.testing.assert_close(model(other)[1:], model(states.double())[1:])
    assert model(other).isfinite().all()
    labels = torch.arange(6) % 3
    found = [
        torch.autograd.grad(F.cross_entropy(model(x), labels), [p for p in model.parameters() if p.requires_grad])
        for x in (states.double(), pairs)
    ]
    for of_states, of_pairs in zip(*found, strict=True):
        torch.testing.assert_close(of_states, of_pairs, atol=1e-5, rtol=0)
    with pytest.raises(pg.PrivacyError, match=r"LowerLayers.*to hold an encoder"):
        models.LowerLayers(str(tmp_path / "absent"))


def test_the_residual_network_has_its_size():
    resnet = models.resnet9(in_channels=3, num_classes=10)
    assert sum(parameter.numel() for parameter in resnet.parameters()) == 2_447_946
    assert models.resnet9(in_channels=1, num_classes=10, width=16)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_the_wide_residual_network_is_wrn_16_4():
    wide = models.wide_resnet(in_channels=3, num_classes=10)
    assert sum(parameter.numel() for parameter in wide.parameters()) == 2_753_818
    assert sum(isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3) for layer in wide.modules()) == 13
    small = models.wide_resnet(in_channels=1, num_classes=7, blocks=1, widen=1)
    assert small(torch.zeros(2, 1, 28, 28)).shape == (2, 7)


def test_standardized_weights_have_mean_zero_and_variance_one_over_fan_in():
    torch.manual_seed(0)
    layer = models.ws_conv2d(3, 4, 3, bias=False)
    found = layer(torch.eye(27).view(27, 3, 3, 3)).view(27, 4)  # each column is one channel's weight
    torch.testing.assert_close(found.mean(0), torch.zeros(4), atol=1e-6, rtol=0)
    weight = dict(layer.named_parameters())["parametrizations.weight.original"]
    square = 27 * weight.flatten(1).var(1, correction=0)
    torch.testing.assert_close(found.var(0, correction=0) * 27, square / (square + 1e-4))
