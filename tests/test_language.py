"""The synthetic language: its best loss is exact. The transformer that learns it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from course_utils.measure.language import Language, Transformer, next_symbol_loss


@pytest.fixture(scope="module")
def language() -> Language:
    return Language()


def sentences(language: Language, count: int, length: int, seed: int = 0):
    return language.sample(count, length, torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- the language
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_the_best_loss_is_that_of_all_sentences_by_their_probability(language, length):
    """The chain rule: the losses of a sentence add up to -log p, less its beginning."""
    pairs, table = language.pairs.tolist(), language.table.tolist()
    total = 0.0
    for sentence in itertools.product(range(8), repeat=length + 1):
        p = pairs[sentence[0]][sentence[1]]
        for a, b, c in zip(sentence, sentence[1:], sentence[2:], strict=False):
            p *= table[a][b][c]
        total += p * (math.log(sum(pairs[sentence[0]])) - math.log(p))
    assert language.best_loss(length) == pytest.approx(total / length, abs=1e-12)


def test_sentences_are_what_the_table_says(language):
    text = sentences(language, 20_000, 5)
    assert text.shape == (20_000, 5)
    assert text.dtype == torch.int64
    seen = torch.zeros(8, 8, 8, dtype=torch.float64)
    for a, b, c in (text[:, :3].T, text[:, 2:].T):  # at the start, and further on
        seen.index_put_((a, b, c), torch.ones(1, dtype=torch.float64), accumulate=True)
    expected = language.pairs[..., None] * language.table
    assert (seen / 40_000 - expected).abs().max() < 0.002
    scores = language.table[text[:, 0], text[:, 1], text[:, 2]].log()
    assert -scores.mean().item() == pytest.approx(language.entropy, abs=0.02)


def test_the_language_is_always_the_same_and_a_seed_gives_the_same_sentences(language):
    assert torch.equal(Language().table, language.table)
    assert language.best_loss(1) > 1.5 * language.entropy  # two symbols say much more
    text = sentences(language, 4, 10)
    assert torch.equal(sentences(language, 4, 10), text)
    assert not torch.equal(sentences(language, 4, 10, seed=1), text)
    assert sentences(language, 4, 1).shape == (4, 1)


# ------------------------------------------------------------------- the transformer
def test_no_position_sees_what_comes_after_it(language):
    torch.manual_seed(0)
    model = Transformer()
    text = sentences(language, 1, 20)
    other = text.clone()
    other[0, 12] = (text[0, 12] + 1) % 8
    scores, changed = model(text), model(other)
    assert torch.equal(scores[:, :12], changed[:, :12])
    assert not torch.allclose(scores[:, 12], changed[:, 12])


def test_the_loss_is_the_mean_of_minus_log_p(language):
    torch.manual_seed(0)
    model, text = Transformer(), sentences(language, 2, 6)
    p = model(text[:, :5]).softmax(dim=-1)
    each = [-p[n, t, text[n, t + 1]].log().item() for n in range(2) for t in range(5)]
    loss = next_symbol_loss(model, text).item()
    assert loss == pytest.approx(sum(each) / 10)
    assert loss == pytest.approx(math.log(8), abs=0.5)  # guessing, before training


def test_the_size_is_as_asked_and_there_are_no_buffers():
    model = Transformer(vocabulary=5, width=32, layers=3, heads=2, context=7)
    in_blocks = sum(p.numel() for p in model.blocks.parameters())
    assert in_blocks == 3 * (12 * 32**2 + 9 * 32)
    assert model(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 7, 5)
    assert list(model.buffers()) == []  # none that the meta device would leave empty
