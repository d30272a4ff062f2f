"""The codec's layers against plain formulas and MLX's own convolutions."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from codec_models import small_config
from golden_data import assert_close
from mlx.utils import tree_flatten

from warble_mlx.codec import convolution, transformer
from warble_mlx.codec.carry import Carry
from warble_mlx.codec.convolution import CausalConv, CausalTransposedConv, convolve, snake
from warble_mlx.codec.quantizer import Book, BookSearch, QuantizingHalf
from warble_mlx.codec.transformer import WindowTransformer, rope_rows
from warble_mlx.config import TransformerConfig
from warble_mlx.layers import rope_table

TRANSFORMER = TransformerConfig(
    dim=32, n_layer=2, n_head=4, n_kv_head=2, head_dim=8, ffn=48, rope_base=1e4, norm_eps=1e-5
)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("length", "inputs", "outputs", "kernel", "stride", "dilation"),
    [
        (40, 16, 8, 7, 1, 1),  # more steps than outputs
        (80, 16, 8, 7, 1, 9),
        (9, 16, 24, 7, 1, 1),  # fewer
        (60, 6, 60, 7, 1, 9),
        (33, 16, 8, 1, 1, 1),
        (40, 16, 1, 7, 1, 3),
        (40, 1, 16, 7, 1, 1),
        (48, 4, 8, 16, 8, 1),
        (12, 8, 8, 2, 2, 1),
    ],
)
def test_every_form_is_the_same_convolution(
    rows: int, length: int, inputs: int, outputs: int, kernel: int, stride: int, dilation: int
) -> None:
    mx.random.seed(length + kernel + dilation)
    x = mx.random.normal((rows, length, inputs))
    weight = mx.random.normal((outputs, kernel, inputs))
    bias = mx.random.normal((outputs,))
    wanted = mx.conv1d(x, weight, stride=stride, dilation=dilation) + bias
    got = convolve(x, weight, bias, stride=stride, dilation=dilation)
    assert_close(got, wanted, 3e-5, "convolution")


@pytest.mark.parametrize("rows", [1, 3])
def test_depthwise_convolution(rows: int) -> None:
    mx.random.seed(1)
    x, weight = mx.random.normal((rows, 20, 12)), mx.random.normal((12, 7, 1))
    bias = mx.random.normal((12,))
    wanted = mx.conv1d(x, weight, groups=12) + bias
    assert_close(convolve(x, weight, bias), wanted, 1e-5, "depthwise convolution")


@pytest.mark.parametrize("stride", [1, 4])
def test_long_gpu_convolutions_are_cut(monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    mx.random.seed(2)
    x, weight = mx.random.normal((2, 100, 3)), mx.random.normal((5, 8, 3))
    wanted = mx.conv1d(x, weight, stride=stride)
    lengths = []

    def watched(*args: mx.array, **options: int) -> mx.array:
        lengths.append(conv1d(*args, **options).shape[1])
        return conv1d(*args, **options)

    conv1d = mx.conv1d
    monkeypatch.setattr(mx, "conv1d", watched)
    monkeypatch.setattr(convolution, "MAX_CONV_OUTPUTS", 20)
    monkeypatch.setattr(convolution, "on_cpu", lambda: False)
    got = convolve(x, weight, mx.zeros((5,)), stride=stride)
    assert_close(got, wanted, 1e-5, "cut convolution")
    assert len(lengths) > 1
    assert max(lengths) * 2 <= 20


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (8, 4), (16, 8)])
@pytest.mark.parametrize("chunk", [1, 2, 11])
def test_transposed_convolution_in_chunks(kernel: int, stride: int, chunk: int) -> None:
    mx.random.seed(3)
    layer = CausalTransposedConv(6, 5, kernel, stride)
    x = mx.random.normal((2, 11, 6))
    whole = mx.conv_transpose1d(x, layer.conv.weight, stride=stride)[:, : 11 * stride]
    state, pieces = None, []
    for first in range(0, 11, chunk):
        carry = Carry(state)
        pieces.append(layer(x[:, first : first + chunk], carry))
        state = carry.finish()
    assert_close(mx.concatenate(pieces, axis=1), whole + layer.conv.bias, 1e-5, "transposed")


def test_a_convolution_sees_nothing_later() -> None:
    layer = CausalConv(4, 4, 7, dilation=3)
    x = mx.random.normal((1, 60, 4))
    changed = mx.concatenate([x[:, :30], x[:, 30:] + 1], axis=1)
    before, after = layer(x, Carry()), layer(changed, Carry())
    assert_close(after[:, :30], before[:, :30], 1e-6, "outputs before the change")
    assert np.abs(np.array(after - before)[:, 30]).max() > 1e-3


def test_snake_is_accurate_on_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.linspace(-60, 60, 20001, dtype=np.float32).reshape(1, -1, 1)
    x = np.concatenate([x, x], axis=2)
    alpha = np.array([0.7, -1.9], np.float32).reshape(1, 1, 2)
    exact = x + np.sin(np.float64(alpha) * x) ** 2 / (np.float64(alpha) + 1e-9)
    # float32 holds a phase of up to 114 to 4e-6, whichever way the sine is taken.
    for cpu in (True, False):
        monkeypatch.setattr(convolution, "on_cpu", lambda answer=cpu: answer)
        assert_close(snake(mx.array(x), mx.array(alpha)), exact, 3e-5, f"snake, cpu={cpu}")


def test_snake_of_small_arguments_is_exact_to_rounding() -> None:
    x = np.linspace(-3, 3, 5001, dtype=np.float32).reshape(1, -1, 1)
    exact = x + np.sin(np.float64(x)) ** 2
    assert_close(snake(mx.array(x), mx.ones((1, 1, 1))), exact, 1e-6, "snake")


def test_rope_rows_are_those_of_the_table() -> None:
    table = np.array(rope_table(300, 64, 1e4))
    rows = np.array(rope_rows(mx.arange(100, 300)[None], 64, 1e4))
    assert np.array_equal(rows[0], table[100:])


def test_rope_rows_far_away() -> None:
    positions = np.arange(2_000_000, 2_000_100)
    rows = np.array(rope_rows(mx.array(positions), 64, 1e4))
    frequencies = 1 / np.power(np.float32(1e4), np.arange(0, 64, 2, dtype=np.float32) / 64)
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    # Frequencies may differ in the last bit, which a long angle multiplies: look at pair 0 alone.
    assert_close(rows[:, 0, 0], np.cos(angles[:, 0]), 2**-8, "cosine")
    assert_close(rows[:, 0, 1], np.sin(angles[:, 0]), 2**-8, "sine")


def plain_window_transformer(model: WindowTransformer, x: mx.array, window: int) -> mx.array:
    """All positions at once, the window as an explicit mask."""
    c, length = model.config, x.shape[1]
    factors = transformer.rotation_for(rope_table(length, c.head_dim, c.rope_base), c)
    q, k = mx.arange(length)[:, None], mx.arange(length)[None]
    mask = (k <= q) & (k > q - window)
    for layer in model.layers:
        pairs = layer.attention.heads(layer.attention_norm(x), factors)
        queries, kv = layer.attention.split(pairs)
        attended = layer.attention.attend(queries, kv, mask)
        x = x + layer.attention_layer_scale.gamma * attended
        fed = layer.feed_forward(layer.ffn_norm(x))
        x = x + layer.ffn_layer_scale.gamma * fed
    return model.norm(x)


@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("chunk", [1, 4, 23])
def test_window_transformer_in_chunks(window: int, chunk: int) -> None:
    mx.random.seed(4)
    model = WindowTransformer(TRANSFORMER, window)
    for layer in model.layers:
        layer.attention_layer_scale.gamma = mx.random.normal((32,))
        layer.ffn_layer_scale.gamma = mx.random.normal((32,))
    x = mx.random.normal((2, 23, 32))
    state, pieces = None, []
    for first in range(0, 23, chunk):
        carry = Carry(state)
        pieces.append(model(x[:, first : first + chunk], carry))
        state = carry.finish()
    wanted = plain_window_transformer(model, x, window)
    assert_close(mx.concatenate(pieces, axis=1), wanted, 1e-5, "window transformer")


def test_no_derived_table_is_a_parameter() -> None:
    names = [name for name, _ in tree_flatten(WindowTransformer(TRANSFORMER, 5).parameters())]
    assert len(names) == 2 * 8 + 1
    assert all(name.endswith((".weight", ".gamma")) for name in names)


def test_search_takes_the_smallest_angle_and_the_lowest_of_equals() -> None:
    book, search = Book(4, 2, 2), BookSearch(2, 2)
    search.in_proj.weight = mx.eye(2)[:, None]
    search.in_proj.bias = mx.zeros((2,))
    # Code 1 is the nearest point to (1, 0.1), code 2 the nearest direction, code 3 equals it.
    book.codebook.weight = mx.array([[0.0, 1.0], [0.9, -0.3], [100.0, 10.0], [100.0, 10.0]])
    assert search(mx.array([[[1.0, 0.1]]]), book).tolist() == [[2]]


def test_a_book_gives_its_own_row_not_the_normalised_one() -> None:
    book = Book(2, 2, 2)
    book.out_proj.weight, book.out_proj.bias = mx.eye(2)[:, None], mx.array([0.5, 0.0])
    book.codebook.weight = mx.array([[3.0, 4.0], [6.0, 8.0]])
    assert book(mx.array([[0, 1]])).tolist() == [[[3.5, 4.0], [6.5, 8.0]]]


def test_each_book_codes_what_the_books_before_it_left() -> None:
    mx.random.seed(9)
    config = small_config()
    half, books = QuantizingHalf(config), [Book(32, 8, 128) for _ in range(10)]
    x = mx.random.normal((1, 4, 128))
    got = np.array(half.quantize(x, books))[0]
    left = np.array(x, np.float64)[0]
    for row, (search, book) in enumerate(zip(half.searches(), books, strict=True)):
        projected = left @ np.array(search.in_proj.weight)[:, 0].T + np.array(search.in_proj.bias)
        table = np.array(book.codebook.weight, np.float64)
        cosine = projected @ (table / np.linalg.norm(table, axis=1, keepdims=True)).T
        nearest = cosine.argmax(axis=1)
        assert got[row].tolist() == nearest.tolist(), f"book {row}"
        out = np.array(book.out_proj.weight)[:, 0]
        left = left - (table[nearest] @ out.T + np.array(book.out_proj.bias))
