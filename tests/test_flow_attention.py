"""Attention: values pass channel by channel, queries and keys matter in pairs, and what is unsure stays."""

import numpy as np
import pytest
import torch
from flow_helpers import Net, close_, kept, prepare_, shrink
from torch import nn
from torch.fx.node import map_arg
from torch.nn import functional as F

from narrowgate.flow.analysis import Flow
from narrowgate.flow.plan import plan as make_plan
from narrowgate.flow.rules import RULES
from narrowgate.flow.trace import trace

TOKENS, WIDTH, HEADS, SIZE = 5, 12, 2, 6
Q, K, V = 0, WIDTH, 2 * WIDTH  # where they start in the rows of qkv


class Attention(nn.Module):
    """Self-attention as timm writes it, with the parts that differ given as functions."""

    def __init__(self, attend, heads=HEADS, size=SIZE, width=WIDTH):
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = heads, size, heads * size
        self.qkv = nn.Linear(width, 3 * self.attn_dim)
        self.proj = nn.Linear(self.attn_dim, width)
        self.attend = attend

    def forward(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, self.attn_dim)
        return self.proj(x)


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def decomposed(q, k, v):
    scores = (q * SIZE**-0.5) @ k.transpose(-2, -1)
    return scores.softmax(dim=-1) @ v


def masked(q, k, v):
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def biased(q, k, v):
    bias = torch.linspace(-1, 1, HEADS * TOKENS * TOKENS, dtype=q.dtype).view(HEADS, TOKENS, TOKENS)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def decomposed_with_bias(q, k, v):
    scores = q @ k.transpose(-2, -1) / SIZE**0.5
    bias = torch.linspace(-1, 1, HEADS * TOKENS * TOKENS, dtype=q.dtype).view(HEADS, TOKENS, TOKENS)
    scores = (scores + bias).masked_fill(torch.ones(TOKENS, TOKENS).triu(2).bool(), -1e4)
    return F.dropout(scores.softmax(-1), 0.1, False) @ v


def by_keyword(q, k, v):
    return F.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.4)


def with_letters(q, k, v):
    scores = torch.einsum("b h i d, b h j d -> b h i j", q * SIZE**-0.5, k)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def with_letters_in_another_order(q, k, v):
    """Heads in the middle, values before their weights, results turned."""
    scores = torch.einsum("bnhd,bhmd->hbnm", q.transpose(1, 2), k)
    out = torch.einsum("bHmd,Hbnm->bnHd", v, scores.softmax(-1))
    return out.transpose(1, 2)


WRITTEN_OUT = [decomposed, with_letters, with_letters_in_another_order]
WAYS = [plain, by_keyword, *WRITTEN_OUT, masked, causal, biased, decomposed_with_bias]


def net(attend, **sizes):
    def body(net, x):
        return net.head(net.attention(net.stem(x)))

    model = Net(body, stem=nn.Linear(3, WIDTH), attention=Attention(attend, **sizes), head=nn.Linear(WIDTH, 4))
    return model.double().eval()


def tokens(batch=3):
    return torch.randn(batch, TOKENS, 3, dtype=torch.float64)


def rows(plan, layer="attention.qkv"):
    """The rows of qkv that are left: queries, keys, values."""
    return rows_of(plan, f"{layer}.weight")


EVERY = list(range(WIDTH))


def without(*gone):
    return [i for i in EVERY if i not in gone]


@pytest.mark.parametrize("attend", WAYS)
def test_dead_values_go_and_so_do_their_columns(attend):
    """Value 0 of head 0 is zero, column 7 (head 1) is not read: both go on both sides, and nothing else."""
    model = net(attend)
    close_(model.attention.qkv, [V + 0])
    with torch.no_grad():
        model.attention.proj.weight[:, 7] = 0
    plan, small = shrink(model, tokens(), layout="scatter")
    assert rows(plan) == [EVERY, EVERY, without(0, 7)]
    assert kept(plan, "attention.proj.weight", 1) == without(0, 7)
    assert small.attention.num_heads == HEADS


@pytest.mark.parametrize("attend", WAYS)
def test_queries_and_keys_go_in_pairs(attend):
    """A query channel whose key is zero goes, and the other way round; a value channel of that number stays."""
    model = net(attend)
    close_(model.attention.qkv, [Q + 2, K + 9])
    plan, _ = shrink(model, tokens(), layout="scatter")
    assert rows(plan) == [without(2, 9), without(2, 9), EVERY]


@pytest.mark.parametrize("attend", WAYS)
def test_a_dead_head_takes_its_queries_and_keys_along(attend):
    model = net(attend)
    with torch.no_grad():
        model.attention.proj.weight[:, SIZE:] = 0
    plan, _ = shrink(model, tokens(), layout="scatter")
    first = list(range(SIZE))
    assert rows(plan) == [first, first, first]


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
@pytest.mark.parametrize("attend", [plain, masked, causal])
@pytest.mark.parametrize("side", ["values", "columns"])
def test_a_dead_head_goes_as_a_whole(layout, attend, side):
    """The block holds its own number of heads, so that number changes with them."""
    model = net(attend)
    if side == "values":
        close_(model.attention.qkv, range(V, V + SIZE))
    else:
        with torch.no_grad():
            model.attention.proj.weight[:, :SIZE] = 0
    plan, small = shrink(model, tokens(), layout=layout)
    last = list(range(SIZE, WIDTH))
    assert rows(plan) == [last, last, last]
    assert kept(plan, "attention.proj.weight", 1) == last
    assert (small.attention.num_heads, small.attention.head_dim, small.attention.attn_dim) == (1, SIZE, SIZE)
    assert model.attention.num_heads == HEADS and type(small.attention.qkv) is nn.Linear


def test_a_head_of_constants_goes_as_a_whole():
    model = net(plain)
    close_(model.attention.qkv, range(V, V + SIZE), constant=0.7)
    _, small = shrink(model, tokens())
    assert small.attention.num_heads == 1


def test_heads_as_many_as_they_are_wide():
    """Three heads of width three: the width is a number of its own, told by its name."""
    model = net(plain, heads=3, size=3)
    close_(model.attention.qkv, range(18, 21))
    _, small = shrink(model, tokens())
    assert (small.attention.num_heads, small.attention.head_dim, small.attention.attn_dim) == (2, 3, 6)


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_nothing_is_left_over_of_a_head(layout):
    """A rotation of the first few numbers of each head, here of all of them, as Phi-3 writes it."""

    def attend(q, k, v):
        q, k = (torch.cat([x[..., :SIZE] * 2, x[..., SIZE:]], -1) for x in (q, k))
        return plain(q, k, v.split([SIZE, 0], -1)[0])

    model = net(attend)
    close_(model.attention.qkv, range(V, V + SIZE))
    shrink(model, tokens(), layout=layout, removes=layout == "scatter")


class NumbersInTheCode(Attention):
    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, 2, 6).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, 12))


class WidthOfTheStream(Attention):
    """The result is reshaped to the width of the input, which does not shrink with the heads."""

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(*qkv.unbind(0)).transpose(1, 2).reshape(batch, tokens, width))


class WidthFromHeads(Attention):
    """Fewer heads would be wider, and attention's scale another."""

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        x = self.attend(*qkv.unbind(0)) * (width // self.num_heads) ** -0.5
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, -1))


class InferredWidth(Attention):
    """A view that infers the width of heads: the right number of heads must be told, or channels are mixed up."""

    def forward(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, 2, -1).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(*qkv.unbind(0)).transpose(1, 2).flatten(2))


class BiasForEachHead(Attention):
    def __init__(self, attend):
        super().__init__(attend)
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))

    def forward(self, x):
        self.attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        return super().forward(x)


@pytest.mark.parametrize("kind", [NumbersInTheCode, WidthOfTheStream, WidthFromHeads, InferredWidth, BiasForEachHead])
def test_heads_stay_where_the_code_counts_on_them(kind):
    model = net(plain)
    model.attention = kind(plain).double()
    close_(model.attention.qkv, range(V, V + SIZE))
    shrink(model, tokens(), removes=False)
    plan, small = shrink(model, tokens(), layout="scatter")
    last = list(range(SIZE, WIDTH))
    assert rows(plan) == [last, last, last]
    assert small.attention.num_heads == HEADS


def test_all_heads_but_one_of_each_block_go():
    torch.manual_seed(0)

    def body(net, x):
        x = net.stem(x)
        for block in net.blocks:
            x = x + block(x)
        return net.head(x)

    blocks = nn.ModuleList(Attention(plain, heads=4, size=3) for _ in range(3))
    model = Net(body, stem=nn.Linear(3, WIDTH), blocks=blocks, head=nn.Linear(WIDTH, 4)).double().eval()
    for i, block in enumerate(blocks):
        with torch.no_grad():
            block.proj.weight[:, [c for c in range(12) if c // 3 > i]] = 0
    _, small = shrink(model, tokens())
    assert [block.num_heads for block in small.blocks] == [1, 2, 3]


def test_norms_of_queries_and_keys_let_heads_go():
    class Normed(Attention):
        def __init__(self):
            super().__init__(plain)
            self.q_norm, self.k_norm = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)

        def forward(self, x):
            self.attend = lambda q, k, v: F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
            return super().forward(x)

    model = net(plain)
    model.attention = Normed().double()
    close_(model.attention.qkv, range(V, V + SIZE))
    _, small = shrink(model, tokens())
    assert small.attention.num_heads == 1


MASKS = {
    "causal": torch.zeros(TOKENS, TOKENS).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -1e4),
    "for_each_key": torch.linspace(-3, 3, TOKENS)[None],
    "for_each_key_4d": torch.linspace(-3, 3, TOKENS)[None, None, None],
    "truth": torch.arange(TOKENS)[None] % 2 == 0,
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_that_a_buffer_holds_stays_whole(mask):
    """A head goes, and the mask has a number for every token: one for all of them would fit, and be another."""

    class Masked(Attention):
        def __init__(self):
            super().__init__(plain)
            self.register_buffer("mask", MASKS[mask].clone())

        def forward(self, x):
            self.attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
            return super().forward(x)

    model = net(plain)
    model.attention = Masked().double()
    close_(model.attention.qkv, range(V, V + SIZE))
    plan, small = shrink(model, tokens())
    assert small.attention.num_heads == 1 and "attention.mask" not in plan.cuts
    shrink(model, tokens(), layout="scatter")


@pytest.mark.parametrize("attend", [plain, decomposed, biased])
def test_aligned_leaves_the_widths_alone(attend):
    model = net(attend)
    close_(model.attention.qkv, [Q + 2, V + 0, V + 7])
    plan, _ = shrink(model, tokens(), removes=False)
    assert any("heads" in wall.why for wall in plan.walls)


@pytest.mark.parametrize("attend", [plain, causal])
def test_a_constant_value_is_folded(attend):
    """The weights of a row sum to 1: the constant passes, and goes into the bias behind."""
    model = net(attend)
    close_(model.attention.qkv, [V + 4], constant=0.7)
    plan, _ = shrink(model, tokens(), layout="scatter")
    assert kept(plan, "attention.proj.weight", 1) == without(4)


def masks_one_row(q, k, v):
    """The first token may look at nothing: its row is zero, not the constant."""
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    mask[0] = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).nan_to_num(0.0)


def drops_always(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def keeps_a_part(q, k, v):
    """Weights that do not sum to 1."""
    return (q @ k.transpose(-2, -1)).sigmoid() @ v


@pytest.mark.parametrize("attend", [masks_one_row, masked, biased, keeps_a_part, *WRITTEN_OUT])
def test_a_constant_value_that_may_not_stay_one_is_kept(attend):
    model = net(attend)
    close_(model.attention.qkv, [V + 4], constant=0.7)
    close_(model.attention.qkv, [V + 5])
    plan, _ = shrink(model, tokens(), layout="scatter")
    assert kept(plan, "attention.proj.weight", 1) == without(5)


def test_dropout_that_always_runs_makes_a_constant_vary():
    model = net(drops_always)
    close_(model.attention.qkv, [V + 4], constant=0.7)
    close_(model.attention.qkv, [V + 5])
    plan = make_plan(model, tokens(), layout="scatter")
    assert kept(plan, "attention.proj.weight", 1) == without(5)


def test_constant_keys_and_queries_stay_what_they_were():
    """A constant query multiplies its key, which varies: both count. The constants are filled in."""
    model = net(plain)
    close_(model.attention.qkv, [Q + 1], constant=1.5)
    close_(model.attention.qkv, [K + 8], constant=-2.0)
    plan, _ = shrink(model, tokens(), layout="scatter")
    assert rows(plan) == [without(1), without(8), EVERY]


@pytest.mark.parametrize("attend", WAYS)
@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_random_zeros(attend, layout):
    torch.manual_seed(0)
    model = prepare_(net(attend), tokens(), share=0.5, keep=["head"])
    shrink(model, tokens(), layout=layout)


def fewer_keys(net, x):
    """Grouped queries: four heads of queries, two of keys and values."""
    batch, count, _ = x.shape
    q = net.q(x).view(batch, count, 4, 3).transpose(1, 2)
    k, v = (layer(x).view(batch, count, 2, 3).transpose(1, 2) for layer in (net.k, net.v))
    x = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return net.proj(x.transpose(1, 2).flatten(2))


def grouped_net():
    parts = {"q": nn.Linear(3, 12), "k": nn.Linear(3, 6), "v": nn.Linear(3, 6), "proj": nn.Linear(12, 4)}
    return Net(fewer_keys, **parts).double().eval()


def test_grouped_queries():
    """Key 1 serves queries 1 and 4; value 5 gives columns 8 and 11, and stays while one of them is read."""
    model = grouped_net()
    close_(model.k, [1])
    close_(model.v, [3])
    with torch.no_grad():
        model.proj.weight[:, [8, 0, 4]] = 0
    plan, _ = shrink(model, tokens(), layout="scatter")
    assert kept(plan, "q.weight") == without(1, 4)
    assert kept(plan, "k.weight") == [0, 2, 3, 4, 5]
    assert kept(plan, "v.weight") == [0, 1, 2, 4, 5]
    assert kept(plan, "proj.weight", 1) == without(0, 4, 6, 8, 9)


def test_cross_attention_with_two_sources():
    def body(net, x, y):
        q, k, v = net.q(x), net.k(y), net.v(y)
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in (q, k, v))
        return net.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    parts = {"q": nn.Linear(3, 6), "k": nn.Linear(4, 6), "v": nn.Linear(4, 6), "proj": nn.Linear(6, 4)}
    model = Net(body, **parts).double().eval()
    close_(model.q, [0])
    close_(model.k, [4])
    close_(model.v, [5])
    inputs = tokens(), torch.randn(3, 7, 4, dtype=torch.float64)
    plan, _ = shrink(model, inputs, layout="scatter")
    assert kept(plan, "q.weight") == kept(plan, "k.weight") == [1, 2, 3, 5]
    assert kept(plan, "v.weight") == kept(plan, "proj.weight", 1) == [0, 1, 2, 3, 4]


def test_a_norm_of_queries_reads_all_of_them():
    """qk_norm: a zero query channel is not zero behind the norm, and its key counts; a head counts as a whole."""

    def body(net, x):
        q, k, v = (t.unflatten(-1, (2, 6)).transpose(1, 2) for t in net.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(net.q_norm(q), net.k_norm(k), v)
        return net.proj(x.transpose(1, 2).flatten(2))

    norms = {"q_norm": nn.LayerNorm(6), "k_norm": nn.LayerNorm(6)}
    model = Net(body, qkv=nn.Linear(3, 36), proj=nn.Linear(12, 4), **norms).double().eval()
    close_(model.qkv, [Q + 2, K + 9, V + 3])
    plan, _ = shrink(model, tokens(), layout="scatter")
    assert rows(plan, "qkv") == [without(2), without(9), without(3)]
    with torch.no_grad():
        model.k_norm.weight[4] = 0
        model.k_norm.bias[4] = 0  # key channel 4 of both heads is zero behind the norm
    plan, _ = shrink(model, tokens(), layout="scatter")
    assert rows(plan, "qkv") == [without(2), without(9), without(3)]  # the norms still read all


def test_shared_weights_keep_what_either_use_needs():
    def body(net, x):
        return net.head(net.attention(net.attention(net.stem(x))))

    model = net(plain)
    model.body = body
    close_(model.attention.qkv, [V + 0])
    shrink(model, tokens(), layout="scatter", removes=False)


def test_a_learned_extra_key_is_read():
    """A learned key and value beside the computed ones: a zero key channel is not zero in all tokens."""

    def body(net, x):
        q, k, v = net.q(x), net.k(x), net.v(x)
        k, v = torch.cat([k, net.bias_k.expand(len(x), 1, 6)], 1), torch.cat([v, net.bias_v.expand(len(x), 1, 6)], 1)
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in (q, k, v))
        return net.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    layers = {name: nn.Linear(3, 6) for name in "qkv"}
    extra = {name: nn.Parameter(torch.randn(1, 1, 6)) for name in ("bias_k", "bias_v")}
    model = Net(body, **layers, **extra, proj=nn.Linear(6, 4)).double().eval()
    close_(model.k, [4])
    close_(model.v, [5])
    plan, _ = shrink(model, tokens(), layout="scatter")
    assert kept(plan, "q.weight") is None
    assert kept(plan, "k.weight") == [0, 1, 2, 3, 5]
    assert kept(plan, "proj.weight", 1) is None


def multihead(body, **options):
    attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
    model = Net(body, stem=nn.Linear(3, WIDTH), attention=attention, head=nn.Linear(WIDTH, 4)).double().eval()
    with torch.no_grad():
        attention.in_proj_bias.normal_()
        for dead in (Q + 1, K + 8, V + 2, V + 7):
            attention.in_proj_weight[dead] = 0
            attention.in_proj_bias[dead] = 0
        attention.out_proj.weight[:, 3] = 0
    close_(model.stem, [0])
    close_(attention.out_proj, [5, 6], constant=0.3)
    return model


def weighed(net, x):
    x = net.stem(x)
    y, weights = net.attention(x, x, x)
    return net.head(y), weights


def unweighed(net, x):
    x = net.stem(x)
    return net.head(net.attention(x, x, x, need_weights=False)[0])


def each_head(net, x):
    x = net.stem(x)
    y, weights = net.attention(x, x, x, average_attn_weights=False)
    return net.head(y), weights


def padded(net, x):
    x = net.stem(x)
    tokens = x.shape[1 if net.attention.batch_first else 0]
    batch = x.shape[0 if net.attention.batch_first else 1]
    padding = torch.arange(tokens).expand(batch, tokens) >= 2
    mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return net.head(net.attention(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0])


OPTIONS = [{}, {"batch_first": True}, {"add_bias_kv": True}, {"add_zero_attn": True}]
MULTIHEAD = [("scatter", body, options) for body in (weighed, unweighed, each_head, padded) for options in OPTIONS]
MULTIHEAD += [(layout, padded, {"batch_first": True}) for layout in ("aligned", "auto")]


@pytest.mark.parametrize(("layout", "body", "options"), MULTIHEAD)
def test_multihead_attention(layout, body, options):
    model = multihead(body, **options)
    plan, small = shrink(model, tokens(), layout=layout, removes=True if layout == "scatter" else None)
    assert isinstance(small.attention, nn.MultiheadAttention)
    if layout == "scatter":
        queries, keys, values = rows_of(plan, "attention.in_proj_weight")
        if "add_bias_kv" in options:  # an extra token in which key 8 is not zero
            assert (queries, keys, values) == (without(1), without(1, 8), without(2, 3, 7))
        elif "add_zero_attn" in options:  # joined behind the view that makes heads: only zeros are known
            assert (queries, keys, values) == (without(1), without(8), without(2, 7))
        else:
            assert (queries, keys, values) == (without(1, 8), without(1, 8), without(2, 3, 7))
        assert not small.attention._qkv_same_embed_dim
    else:
        assert type(small.attention) is nn.MultiheadAttention


def rows_of(plan, weight):
    positions = np.array(kept(plan, weight))
    return [(positions[(positions >= at) & (positions < at + WIDTH)] - at).tolist() for at in (Q, K, V)]


def test_cross_attention_of_pytorch():
    """Three sources: the packed weight is taken apart before it is used, so only the projection behind can shrink."""

    def body(net, x):
        x = net.stem(x)
        return net.head(net.attention(x, x.flip(0), x * 2, need_weights=False)[0])

    model = multihead(body)
    plan, _ = shrink(model, tokens(), layout="scatter")
    assert kept(plan, "attention.in_proj_weight") is None


def test_encoder_layer_of_pytorch():
    """It reads its attention's weights itself on its fast path, which the narrow ones must not be taken to."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(3, WIDTH), layer, nn.Linear(WIDTH, 4)).double().eval()
    with torch.no_grad():
        layer.self_attn.in_proj_weight[V : V + 3] = 0
        layer.self_attn.in_proj_bias[V : V + 3] = 0
    close_(layer.linear1, [0, 1, 2])
    _, small = shrink(model, tokens(), layout="scatter")
    assert len(small[1].self_attn.in_proj_weight) == 3 * WIDTH - 3


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_linear_layers_of_pytorchs_encoder_layer(side):
    """Its fast path reads their weights as well: narrow ones it could not multiply, or not add."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(3, WIDTH), layer, nn.Linear(WIDTH, 4)).double().eval()
    if side == "outputs":
        close_(layer.linear2, [1, 2, 5])
    else:
        with torch.no_grad():
            layer.linear1.weight[:, [1, 2, 5]] = 0
    shrink(model, tokens(), layout="scatter")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [True, False])
def test_an_encoder_of_pytorch_that_makes_nested_tensors(nested):
    """What a mask hides is left out of them, and comes back as zeros; no layer can pick from them."""

    def body(net, x):
        hidden = torch.arange(x.shape[1]) > 2 * (x[:, :1, 0] > 0)
        return net.head(net.encoder(net.stem(x), src_key_padding_mask=hidden))

    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)
    model = Net(body, stem=nn.Linear(3, WIDTH), encoder=encoder, head=nn.Linear(WIDTH, 4)).double().eval()
    layer = encoder.layers[0]
    with torch.no_grad():
        layer.self_attn.in_proj_weight[V : V + 3] = 0
        layer.self_attn.in_proj_bias[V : V + 3] = 0
        layer.linear1.weight[:, 1] = 0
    close_(layer.linear1, [0, 1, 2])
    close_(layer.linear2, [3])
    plan, small = shrink(model, tokens(), layout="scatter")
    assert small.encoder.layers[0].linear1.out_features == 13
    assert (kept(plan, "encoder.layers.0.self_attn.in_proj_weight") is None) == nested


def test_narrow_multihead_attention_is_saved_and_loaded(tmp_path):
    import narrowgate as ng

    model = multihead(unweighed)
    plan, small = shrink(model, tokens(), layout="scatter")
    ng.save(small, plan, tmp_path / "small")
    again = ng.load(tmp_path / "small", lambda: multihead(unweighed)).eval()
    x = tokens()
    assert torch.equal(again(x), small(x))


def test_a_view_that_is_no_head_stays_coarse_and_right():
    """Channels mixed by an operation without a rule, behind a view that splits them."""

    def body(net, x):
        x = net.a(x).unflatten(-1, (3, 4))
        return net.b(torch.sort(x, dim=-1).values.flatten(2))

    model = Net(body, a=nn.Linear(3, 12), b=nn.Linear(12, 4)).double().eval()
    close_(model.a, [0, 5])
    plan, _ = shrink(model, tokens(), layout="scatter")
    assert kept(plan, "b.weight", 1) is None


def test_train_mode_still_runs_with_dropout():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if model.training else 0.0)

    model = net(attend)
    close_(model.attention.qkv, [V + 0, Q + 3])
    _, small = shrink(model, tokens(), layout="scatter")
    x = tokens()
    torch.manual_seed(0)
    wanted = model.train()(x)  # not a copy of it: that would ask this one for its mode
    torch.manual_seed(0)
    assert torch.allclose(small.train()(x), wanted)


def test_tokens_that_are_channels_are_a_wall():
    """Attention across channels (as in channel attention): the labelled axis is that of the tokens."""

    def body(net, x):
        y = net.a(x).transpose(1, 2)  # batch, channels, tokens
        return net.b(F.scaled_dot_product_attention(y, y, y).transpose(1, 2))

    model = Net(body, a=nn.Linear(3, 6), b=nn.Linear(6, 4)).double().eval()
    close_(model.a, [0, 5])
    plan, _ = shrink(model, tokens(), layout="scatter")
    assert kept(plan, "b.weight", 1) is None


@pytest.mark.parametrize("attend", WAYS)
def test_every_constant_is_what_the_model_computes(attend):
    """All that the rules say of any tensor on the way, held against a run of the graph."""
    torch.manual_seed(0)
    x = tokens()
    model = prepare_(net(attend), x, share=0.5, keep=["head"])
    flow = Flow(trace(model, x), model).run(RULES)
    computed = run_graph(flow, x)
    checked = 0
    for node, spread in flow.spreads.items():
        values = np.broadcast_to(spread.values[spread.index], computed[node].shape)
        known = ~np.isnan(values)
        assert np.allclose(values[known], computed[node].numpy()[known], rtol=1e-12, atol=1e-14), node
        checked += int(known.sum())
    assert checked > 100


def run_graph(flow, x):
    results = {}
    for node in flow.graph.nodes:
        if node in flow.graph.tensors:
            results[node] = flow.tensors[flow.graph.tensors[node]].detach()
        elif node.op == "placeholder":
            results[node] = x if node.meta["val"].shape == x.shape else torch.tensor(0.0)
        elif node.op == "call_function":
            args, kwargs = map_arg(node.args, results.__getitem__), map_arg(node.kwargs, results.__getitem__)
            results[node] = node.target(*args, **kwargs)
    return results
