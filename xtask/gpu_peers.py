"""PyTorch's time on the work of `plica bench ops --json FILE`: reads its lines, does each operation at the same sizes
and types on the GPU, and prints one JSON line an operation with `op`, `setting`, `us`, `us_range` (times between two
events, median, fastest and slowest). What PyTorch has no call for is told with `skipped`. --compile puts each function
of several calls through torch.compile. --cpu tries the functions out where there is no GPU; its times are the CPU's and
no comparison. `cargo run -p xtask -- gpu-peers` joins both programs' rows."""

import argparse
import json
import math
import sys
import time

import torch
import torch.nn.functional as F

BF16, F32 = torch.bfloat16, torch.float32


def normal(*shape, dtype=BF16, device="cuda"):
    return torch.randn(*shape, dtype=F32, device=device).to(dtype)


class Bench:
    """Functions by the name of the operation; each makes its inputs and returns (prepare, run)."""

    def __init__(self, device, compiled):
        self.device = device
        self.wrap = torch.compile if compiled else (lambda f: f)

    def new(self, *shape, dtype=BF16):
        return normal(*shape, dtype=dtype, device=self.device)

    def fixed(self, f):
        return (lambda: None), (lambda _: f())

    def backward(self, inputs, output):
        """The backward alone, from the same graph again and again."""
        dy = self.new(*output.shape, dtype=output.dtype)
        return self.fixed(lambda: torch.autograd.grad(output, inputs, dy, retain_graph=True))

    # elementwise
    def add(self, s):
        a, b = self.new(s["rows"], s["width"]), self.new(s["rows"], s["width"])
        return self.fixed(lambda: a + b)

    def axpy(self, s):
        y, x = self.new(s["rows"], s["width"]), self.new(s["rows"], s["width"])
        return self.fixed(lambda: y.add_(x, alpha=1e-3))

    def cast(self, s):
        x = self.new(s["rows"], s["width"], dtype=F32)
        return self.fixed(lambda: x.to(BF16))

    def scale_rows(self, s):
        x, w = self.new(s["rows"], s["width"]), self.new(s["rows"], 1, dtype=F32)
        f = self.wrap(lambda: (x * w).to(BF16))
        return self.fixed(f)

    def add_bias(self, s):
        x, b = self.new(s["rows"], s["width"]), self.new(s["width"])
        return self.fixed(lambda: x.add_(b))

    def take_columns(self, s):
        x = self.new(s["rows"], s["width"])
        return self.fixed(lambda: x[:, : s["width"] // 2].contiguous())

    def transpose2(self, s):
        x = self.new(s["rows"], s["width"])
        return self.fixed(lambda: x.t().contiguous())

    def sum_in_order(self, s):
        a, b, c, d = (self.new(s["rows"], s["width"]) for _ in range(4))
        f = self.wrap(lambda: (a.float() + b.float() + c.float() + d.float()).to(BF16))
        return self.fixed(f)

    def accumulate_column_sums(self, s):
        x, total = self.new(s["rows"], s["width"]), torch.zeros(s["width"], device=self.device)
        return self.fixed(lambda: total.add_(x.sum(0, dtype=F32)))

    def sum_of_squares(self, s):
        x = self.new(s["rows"], s["width"], dtype=F32)
        return self.fixed(lambda: torch.linalg.vector_norm(x).item())

    # loss and update
    def cross_entropy(self, s):
        x, y = self.new(s["rows"], s["vocab"], dtype=F32), self.ids(s["rows"], s["vocab"])
        f = self.wrap(lambda: F.cross_entropy(x, y, reduction="none"))
        return self.fixed(f)

    def cross_entropy_in_place(self, s):
        x, y = self.new(s["rows"], s["vocab"], dtype=F32).requires_grad_(), self.ids(s["rows"], s["vocab"])
        loss = self.wrap(lambda x, y: F.cross_entropy(x, y, reduction="sum"))
        return self.fixed(lambda: torch.autograd.grad(loss(x, y), x))

    def adamw_step_rounded(self, s):
        master = torch.nn.Parameter(self.new(s["params"], dtype=F32))
        master.grad = self.new(s["params"], dtype=F32)
        weight = torch.empty(s["params"], dtype=BF16, device=self.device)
        update = torch.optim.AdamW([master], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

        def step():
            update.step()
            weight.copy_(master.detach())

        return self.fixed(step)

    # rows
    def rms_forward(self, s):
        x, w = self.new(s["rows"], s["width"]), self.new(s["width"])
        f = self.wrap(lambda: F.rms_norm(x, (s["width"],), w, 1e-5))
        return self.fixed(f)

    def rms_backward(self, s):
        x, w = self.new(s["rows"], s["width"]).requires_grad_(), self.new(s["width"]).requires_grad_()
        f = self.wrap(lambda x, w: F.rms_norm(x, (s["width"],), w, 1e-5))
        return self.backward((x, w), f(x, w))

    def layer_norm_forward(self, s):
        x, w, b = self.new(s["rows"], s["width"]), self.new(s["width"]), self.new(s["width"])
        return self.fixed(lambda: F.layer_norm(x, (s["width"],), w, b, 1e-5))

    def layer_norm_backward(self, s):
        inputs = [self.new(s["rows"], s["width"]), self.new(s["width"]), self.new(s["width"])]
        x, w, b = (t.requires_grad_() for t in inputs)
        return self.backward((x, w, b), F.layer_norm(x, (s["width"],), w, b, 1e-5))

    def gated(self):
        def swiglu(gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate) * up

        return self.wrap(swiglu)

    def swiglu_forward(self, s):
        x, f = self.new(s["rows"], 2 * s["ffn"]), self.gated()
        return self.fixed(lambda: f(x))

    def swiglu_backward(self, s):
        x, f = self.new(s["rows"], 2 * s["ffn"]).requires_grad_(), self.gated()
        return self.backward((x,), f(x))

    def rope_forward(self, s):
        x = self.new(s["rows"], s["heads"], s["head_dim"])
        angle = torch.outer(
            torch.arange(s["rows"], device=self.device).float(),
            1e4 ** (-torch.arange(0, s["head_dim"], 2, device=self.device).float() / s["head_dim"]),
        )
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def turn():
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(BF16)

        return self.fixed(self.wrap(turn))

    def embedding_forward(self, s):
        table, ids = self.new(s["vocab"], s["width"]), self.ids(s["rows"], s["vocab"])
        return self.fixed(lambda: F.embedding(ids, table))

    def embedding_backward(self, s):
        gradient = torch.zeros(s["vocab"], s["width"], device=self.device)
        dx, ids = self.new(s["rows"], s["width"]), self.ids(s["rows"], s["vocab"])
        return self.fixed(lambda: gradient.index_add_(0, ids, dx.float()))

    def topk_rows(self, s):
        x = self.new(s["rows"], s["experts"], dtype=F32)
        return self.fixed(lambda: torch.topk(x, s["top_k"], dim=-1))

    def gather_rows(self, s):
        x, index = self.new(s["rows"], s["width"]), self.order(s)
        return self.fixed(lambda: x.index_select(0, index))

    def scatter_sum(self, s):
        y, index = self.new(s["rows"] * s["top_k"], s["width"]), self.order(s)

        def combine():
            out = torch.zeros(s["rows"], s["width"], device=self.device)
            return out.index_add_(0, index, y.float()).to(BF16)

        return self.fixed(combine)

    # products
    def matmul_nt(self, s):
        x, w = self.new(s["m"], s["k"]), self.new(s["n"], s["k"])
        return self.fixed(lambda: x @ w.t())

    def matmul_nn(self, s):
        dy, w = self.new(s["m"], s["n"]), self.new(s["n"], s["k"])
        return self.fixed(lambda: dy @ w)

    def accumulate_tn(self, s):
        dy, x = self.new(s["m"], s["n"]), self.new(s["m"], s["k"])
        gradient = torch.zeros(s["n"], s["k"], device=self.device)
        return self.fixed(lambda: gradient.add_(dy.t() @ x))

    def counts(self, s, skewed):
        rows, experts = s["rows"], s["experts"]
        first = rows * 3 // 10 if skewed else rows // experts
        rest, others = experts - 1, rows - first
        return [first] + [others // rest + (e < others % rest) for e in range(rest)]

    def grouped(self, s, skewed=False):
        x, w = self.new(s["rows"], s["k"]), self.new(s["experts"], s["n"], s["k"])
        counts = self.counts(s, skewed)
        if hasattr(torch, "_grouped_mm") and self.device == "cuda":
            ends = torch.tensor(counts, device=self.device).cumsum(0).to(torch.int32)
            return self.fixed(lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends))
        parts = x.split(counts)
        return self.fixed(lambda: torch.cat([part @ one.t() for part, one in zip(parts, w)]))

    def grouped_nt(self, s):
        return self.grouped(s)

    def grouped_nt_skewed(self, s):
        return self.grouped(s, True)

    def grouped_nn(self, s):
        dy, w = self.new(s["rows"], s["n"]), self.new(s["experts"], s["n"], s["k"])
        counts = self.counts(s, False)
        if hasattr(torch, "_grouped_mm") and self.device == "cuda":
            ends = torch.tensor(counts, device=self.device).cumsum(0).to(torch.int32)
            return self.fixed(lambda: torch._grouped_mm(dy, w, offs=ends))
        parts = dy.split(counts)
        return self.fixed(lambda: torch.cat([part @ one for part, one in zip(parts, w)]))

    def grouped_accumulate_tn(self, s):
        counts = self.counts(s, False)
        dys, xs = self.new(s["rows"], s["n"]).split(counts), self.new(s["rows"], s["k"]).split(counts)
        gradient = torch.zeros(s["experts"], s["n"], s["k"], device=self.device)

        def add():
            for one, dy, x in zip(gradient, dys, xs):
                one.add_(dy.t() @ x)

        return self.fixed(add)

    def heads(self, s):
        counts = (s["heads"], s["kv_heads"], s["kv_heads"])
        return [self.new(1, heads, s["sequence"], s["head_dim"]) for heads in counts]

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def attention_forward(self, s):
        q, k, v = self.heads(s)
        return self.fixed(lambda: self.attend(q, k, v))

    def attention_backward(self, s):
        q, k, v = (t.requires_grad_() for t in self.heads(s))
        return self.backward((q, k, v), self.attend(q, k, v))

    # inputs
    def ids(self, count, bound):
        return torch.randint(0, bound, (count,), device=self.device)

    def order(self, s):
        """Tokens by expert, each `top_k` times."""
        index = torch.arange(s["rows"], device=self.device).repeat(s["top_k"])
        return index[torch.randperm(len(index), device=self.device)]


NAMES = {
    "grouped_nt, one expert has 30 %": "grouped_nt_skewed",
    "grouped_nt, sizes on the device": "grouped_nt",
    "matmul_nt, the grouped one's work": "matmul_nt",
    "take_columns, half": "take_columns",
    "sum_in_order, 4 parts": "sum_in_order",
    "sum_of_squares, read by the host": "sum_of_squares",
}


def measure(prepare, run, repetitions, device):
    """Microseconds: median, [fastest, slowest]. A GPU is waited for once, at the end, as in plica."""
    spans = []
    for _ in range(repetitions + 3):
        state = prepare()
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(state)
            end.record()
        else:
            start = time.perf_counter()
            run(state)
            end = time.perf_counter()
        spans.append((start, end))
    if device == "cuda":
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) * 1e3 for start, end in spans]
    else:
        times = [(end - start) * 1e6 for start, end in spans]
    times = sorted(times[3:])
    return times[len(times) // 2], [times[0], times[-1]]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", help="lines of plica bench ops --json")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print(json.dumps({"skipped": f"PyTorch {torch.__version__} sees no GPU"}))
        return
    device = "cpu" if options.cpu else "cuda"
    bench = Bench(device, options.compile)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    with open(options.rows) as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    for row in rows:
        found = {"op": row["op"], "setting": row["setting"], "torch": torch.__version__, "device": name}
        function = getattr(bench, NAMES.get(row["op"], row["op"]), None)
        if function is None:
            found["skipped"] = "no such operation in this script"
        else:
            try:
                found["us"], found["us_range"] = measure(*function(row["sizes"]), options.repetitions, device)
                assert math.isfinite(found["us"])
            except (RuntimeError, NotImplementedError, TypeError) as error:
                found["skipped"] = str(error).splitlines()[0]
            if device == "cuda":
                torch.cuda.empty_cache()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
