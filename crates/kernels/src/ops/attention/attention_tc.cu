// Attention of bf16 heads of 64, 96 or 128 columns on tensor cores: mma over tiles in shared memory, the running softmax
// in f32 registers, no matrix of scores in memory (Dao, "FlashAttention-2", 2023). What is computed, and what `runs`
// and `spans` hold, is said in attention.cu, whose kernels prepare D and the log of the denominator for the backward.
//
// Probabilities and dS are rounded to bf16 before the second product, whose sums are f32; everything else is f32. So an
// output differs from one with f32 probabilities by at most 2^-8 of the sum of its terms' magnitudes.
//
// With P visible pairs a head of d columns and h heads: forward 4 P h d flops, backward 14 P h d (the scores and dP are
// made once for dq and once for dk and dv, which is the price of sums without atomics; 10 P h d are needed). Bytes from
// memory: each tensor once; from the second-level cache k and v once every 64 or 128 queries, q and dO once every 64
// keys. The floor is the flops over the tensor cores' peak; below some 64 visible keys a query it is bytes over bandwidth.
//
// Shared memory: rows of d + 8 elements, so that the eight rows of an ldmatrix lie in different banks. Copies run under
// arithmetic: in the forward v under the scores and the next k under P V; in the backward the next pair of tiles.

constexpr int THREADS = 128, OTHER = 64;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

template <int D> struct HeadTile {
    static constexpr int ROW = D + 8;
    // Elements of 64 rows.
    static constexpr int SIZE = 64 * ROW;
};

struct Run {
    int begin, end;
};
DEVICE Run run_of(const int* runs, i64 row, i64 rows) {
    Run run = {0, 0};
    if (row < rows) run = {runs[2 * row], runs[2 * row + 1]};
    return run;
}
// Keys between the first begin and the last end of queries first .. first + count.
DEVICE Run keys_of(const int* runs, i64 first, i64 count, i64 rows) {
    Run run = {0, 0};
    i64 last = min_of(first + count, rows) - 1;
    if (first < rows) run = {runs[2 * first], runs[2 * last + 1]};
    return run;
}

// ---- pieces of a warp
DEVICE int own_lane_index() { return threadIdx.x & 31; }
DEVICE int own_warp() { return threadIdx.x >> 5; }

// Starts copying rows first .. first + ROWS of a head ([rows, stride]) to shared memory; zeros behind the last.
template <int D, int ROWS> DEVICE void start_rows(bf16* to, const bf16* head, i64 stride, i64 first, i64 rows) {
    constexpr int PARTS = D / 8;
    for (int e = threadIdx.x; e < ROWS * PARTS; e += THREADS) {
        int row = e / PARTS, part = e % PARTS;
        bool there = first + row < rows;
        cp_async_16(to + row * HeadTile<D>::ROW + part * 8, head + (there ? (first + row) * stride : 0) + part * 8, there ? 16 : 0);
    }
}

// s[m][n] = own rows (own_row + 16 m ..) . other rows (8 n ..) over D columns.
template <int D, int M, int N> DEVICE void product_nt(float (&s)[M][N][4], const bf16* own, int own_row, const bf16* other) {
    int lane = own_lane_index();
    const bf16* a_row = own + (own_row + (lane & 15)) * HeadTile<D>::ROW + (lane >> 4) * 8;
    const bf16* b_row = other + ((lane & 7) + (lane >> 4) * 8) * HeadTile<D>::ROW + ((lane >> 3) & 1) * 8;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix_x4(a[m], a_row + 16 * m * HeadTile<D>::ROW + 16 * k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            ldmatrix_x4(b, b_row + 8 * n * HeadTile<D>::ROW + 16 * k);
            u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_bf16(s[m][n], a[m], low);
                mma_bf16(s[m][n + 1], a[m], high);
            }
        }
    }
}

// sums[m] [16, D] += a[m] [16, 8 N] other [8 N, D], where a is in registers.
template <int D, int M, int N>
DEVICE void product_nn(float (&sums)[M][D / 8][4], const u32 (&a)[M][N / 2][4], const bf16* other) {
    int lane = own_lane_index();
    const bf16* b_row = other + (lane & 15) * HeadTile<D>::ROW + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            u32 b[4];
            ldmatrix_x4_transposed(b, b_row + 16 * k * HeadTile<D>::ROW + 8 * n);
            u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_bf16(sums[m][n], a[m][k], low);
                mma_bf16(sums[m][n + 1], a[m][k], high);
            }
        }
}

// The sums' layout of a product is that of the next one's left operand, two groups of 8 columns at a time.
template <int M, int N> DEVICE void as_operand(u32 (&a)[M][N / 2][4], const float (&s)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++) {
            a[m][n / 2][n % 2 * 2] = pack_bf16(s[m][n][0], s[m][n][1]);
            a[m][n / 2][n % 2 * 2 + 1] = pack_bf16(s[m][n][2], s[m][n][3]);
        }
}
template <int M, int N> DEVICE void clear(float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0;
}

// Scores of a tile that rows first .. of a warp do not see become -inf. Only tiles on the edge of what is visible come
// here, so the runs are read again rather than kept in registers.
template <int M> DEVICE void hide(float (&s)[M][OTHER / 8][4], const int* runs, i64 first, i64 rows, int key) {
    int lane = own_lane_index();
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        Run run = run_of(runs, first + 16 * (r / 2) + 8 * (r % 2) + lane / 4, rows);
#pragma unroll
        for (int n = 0; n < OTHER / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int place = key + 8 * n + lane % 4 * 2 + i;
                if (place < run.begin || place >= run.end) s[r / 2][n][r % 2 * 2 + i] = -infinity<float>();
            }
    }
}
// What the rows of a warp see together, and what each of them sees.
struct WarpRuns {
    Run some, every;
    DEVICE_MEMBER bool sees(int key) const { return key < some.end && key + OTHER > some.begin; }
    DEVICE_MEMBER bool sees_all(int key) const { return key >= every.begin && key + OTHER <= every.end; }
};
DEVICE WarpRuns warp_runs(const int* runs, i64 first, int count, i64 rows) {
    WarpRuns warp;
    warp.some = keys_of(runs, first, count, rows);
    // Both ends rise: the last row begins last, the first one ends first. Rows behind the end see nothing.
    warp.every = {0, 0};
    if (first + count <= rows) warp.every = {runs[2 * (first + count - 1)], runs[2 * first + 1]};
    return warp;
}

DEVICE void store_pair(float* to, float a, float b) {
    uint2 raw = {float_to_bits(a), float_to_bits(b)};
    *reinterpret_cast<uint2*>(to) = raw;
}
DEVICE void store_pair(bf16* to, float a, float b) { *reinterpret_cast<u32*>(to) = pack_bf16(a, b); }

// Writes sums to rows first + 16 m + lane / 4 (+ 8) of a head, each row times its factor.
template <int D, int M, class O>
DEVICE void write_rows(O* head, i64 stride, i64 first, i64 rows, const float (&sums)[M][D / 8][4], const float (&factor)[2 * M]) {
    int lane = own_lane_index();
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        i64 row = first + 16 * (r / 2) + 8 * (r % 2) + lane / 4;
        if (row >= rows) continue;
        O* to = head + row * stride + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            store_pair(to + 8 * n, sums[r / 2][n][r % 2 * 2] * factor[r], sums[r / 2][n][r % 2 * 2 + 1] * factor[r]);
    }
}
DEVICE float quad_max(float x) {
    x = max_of(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return max_of(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(WHOLE_WARP, x, 1);
    return x + __shfl_xor_sync(WHOLE_WARP, x, 2);
}

// ---- forward: a block 64 M queries of a head, a warp 16 M of them
// Takes a tile of scores into the running softmax of the warp's rows, in powers of two: s becomes the probabilities, and
// the sums so far shrink where the largest score grew.
template <int D, int M>
DEVICE void advance(float (&s)[M][OTHER / 8][4], float (&sums)[M][D / 8][4], float (&largest)[2 * M], float (&sum)[2 * M], float scale) {
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        constexpr int N = OTHER / 8;
        int m = r / 2, at = r % 2 * 2;
        float best = largest[r];
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                s[m][n][at + i] *= scale;
                best = max_of(best, s[m][n][at + i]);
            }
        best = quad_max(best);
        // Where nothing was seen so far everything stays 0.
        float base = best == -infinity<float>() ? 0.0f : best, shrink = exp2f(largest[r] - base), total = 0;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float p = exp2f(s[m][n][at + i] - base);
                s[m][n][at + i] = p;
                total += p;
            }
        sum[r] = sum[r] * shrink + total;
        largest[r] = best;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            sums[m][n][at] *= shrink;
            sums[m][n][at + 1] *= shrink;
        }
    }
}

template <int D, int M, class O>
DEVICE void forward(const bf16* q, const bf16* k, const bf16* v, const bf16* sinks, const int* runs, O* out, float* lse, i64 queries,
                    i64 keys, int heads, int group, float scale) {
    constexpr int OWN = 64 * M;
    DYNAMIC_SHARED(bf16, q_tile);
    bf16 *k_tile = q_tile + M * HeadTile<D>::SIZE, *v_tile = k_tile + HeadTile<D>::SIZE;
    int kv_heads = heads / group, own_row = own_warp() * 16 * M;
    i64 tiles = ceil_div(queries, OWN), q_stride = i64(heads) * D, kv_stride = i64(kv_heads) * D;
    for (i64 item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
        // The last queries see most: they go first.
        i64 first = (tiles - 1 - item / heads) * OWN;
        int head = int(item % heads), kv = head / group;
        Run seen = keys_of(runs, first, OWN, queries);
        WarpRuns warp = warp_runs(runs, first + own_row, 16 * M, queries);
        start_rows<D, OWN>(q_tile, q + head * D, q_stride, first, queries);
        if (seen.begin < seen.end) start_rows<D, OTHER>(k_tile, k + kv * D, kv_stride, seen.begin, keys);
        cp_async_commit();
        float largest[2 * M], sum[2 * M], sums[M][D / 8][4];
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            largest[r] = -infinity<float>();
            sum[r] = 0;
        }
        clear(sums);
        for (int key = seen.begin; key < seen.end; key += OTHER) {
            cp_async_wait<0>();
            __syncthreads();
            start_rows<D, OTHER>(v_tile, v + kv * D, kv_stride, key, keys);
            cp_async_commit();
            u32 p[M][OTHER / 16][4];
            bool sees = warp.sees(key);
            if (sees) {
                float s[M][OTHER / 8][4];
                product_nt<D, M, OTHER / 8>(s, q_tile, own_row, k_tile);
                if (!warp.sees_all(key)) hide<M>(s, runs, first + own_row, queries, key);
                advance<D, M>(s, sums, largest, sum, scale * LOG2_E);
                as_operand<M, OTHER / 8>(p, s);
            }
            cp_async_wait<0>();
            __syncthreads();
            if (key + OTHER < seen.end) start_rows<D, OTHER>(k_tile, k + kv * D, kv_stride, key + OTHER, keys);
            cp_async_commit();
            if (sees) product_nn<D, M, OTHER / 8>(sums, p, v_tile);
        }
        float factor[2 * M];
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            float total = quad_sum(sum[r]), log_sum = -infinity<float>();
            factor[r] = 0;
            if (total > 0) {
                log_sum = largest[r] * LN_2 + logf(total);
                factor[r] = 1 / total;
                if (sinks) {
                    // 1 / (1 + e^(sink - lse)), the share of the keys in the denominator.
                    factor[r] *= 1 / (1 + expf(to_acc(sinks[head]) - log_sum));
                }
            } else if (total != total) {
                log_sum = total;
                factor[r] = total;
            }
            i64 row = first + own_row + 16 * (r / 2) + 8 * (r % 2) + own_lane_index() / 4;
            if (own_lane_index() % 4 == 0 && row < queries) lse[row * heads + head] = log_sum;
        }
        write_rows<D, M>(out + head * D, q_stride, first + own_row, queries, sums, factor);
        cp_async_wait<0>();
        __syncthreads();
    }
}

// ---- backward
// In powers of two; 0 where a query sees nothing, so that what is hidden (-inf) becomes 0 there too.
DEVICE float log_of_denominator(const float* totals, i64 row, i64 rows, int heads, int head) {
    float total = row < rows ? totals[row * heads + head] : 0.0f;
    return total == -infinity<float>() ? 0.0f : total * LOG2_E;
}

// dq = scale dS K with dS = P (dO V^T - D): a block 64 queries of a head, a warp 16 of them.
template <int D, class O>
DEVICE void backward_queries(const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* totals, const float* d_rows,
                             const int* runs, O* dq, i64 queries, i64 keys, int heads, int group, float scale) {
    constexpr int OWN = 64, N = OTHER / 8, SIZE = HeadTile<D>::SIZE;
    DYNAMIC_SHARED(bf16, q_tile);
    bf16 *dout_tile = q_tile + SIZE, *pairs = dout_tile + SIZE;
    int kv_heads = heads / group, own_row = own_warp() * 16;
    i64 tiles = ceil_div(queries, OWN), q_stride = i64(heads) * D, kv_stride = i64(kv_heads) * D;
    for (i64 item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
        i64 first = (tiles - 1 - item / heads) * OWN;
        int head = int(item % heads), kv = head / group;
        Run seen = keys_of(runs, first, OWN, queries);
        WarpRuns warp = warp_runs(runs, first + own_row, 16, queries);
        start_rows<D, OWN>(q_tile, q + head * D, q_stride, first, queries);
        start_rows<D, OWN>(dout_tile, dout + head * D, q_stride, first, queries);
        auto start_pair = [&](int key, int stage) {
            bf16* to = pairs + stage * 2 * SIZE;
            start_rows<D, OTHER>(to, k + kv * D, kv_stride, key, keys);
            start_rows<D, OTHER>(to + SIZE, v + kv * D, kv_stride, key, keys);
        };
        if (seen.begin < seen.end) start_pair(seen.begin, 0);
        cp_async_commit();
        float total[2], delta[2], sums[1][D / 8][4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            i64 row = first + own_row + 8 * r + own_lane_index() / 4;
            total[r] = log_of_denominator(totals, row, queries, heads, head);
            delta[r] = row < queries ? d_rows[row * heads + head] : 0.0f;
        }
        clear(sums);
        int stage = 0;
        for (int key = seen.begin; key < seen.end; key += OTHER, stage ^= 1) {
            cp_async_wait<0>();
            __syncthreads();
            if (key + OTHER < seen.end) start_pair(key + OTHER, stage ^ 1);
            cp_async_commit();
            if (!warp.sees(key)) continue;
            const bf16 *k_tile = pairs + stage * 2 * SIZE, *v_tile = k_tile + SIZE;
            float s[1][N][4], dp[1][N][4];
            product_nt<D, 1, N>(s, q_tile, own_row, k_tile);
            if (!warp.sees_all(key)) hide<1>(s, runs, first + own_row, queries, key);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[0][n][i] = exp2f(s[0][n][i] * (scale * LOG2_E) - total[i / 2]);
            product_nt<D, 1, N>(dp, dout_tile, own_row, v_tile);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[0][n][i] *= dp[0][n][i] - delta[i / 2];
            u32 ds[1][N / 2][4];
            as_operand<1, N>(ds, s);
            product_nn<D, 1, N>(sums, ds, k_tile);
        }
        float factor[2] = {scale, scale};
        write_rows<D, 1>(dq + head * D, q_stride, first + own_row, queries, sums, factor);
        cp_async_wait<0>();
        __syncthreads();
    }
}

// What the keys' kernel needs to know of the queries of a tile.
struct QueryFacts {
    float total[OTHER], delta[OTHER];
    Run run[OTHER];
};

// Scores [16 keys, queries] from key first on that their query does not see become -inf.
template <int N> DEVICE void hide_turned(float (&s)[1][N][4], const Run* run, int first) {
    int lane = own_lane_index();
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Run seen = run[8 * n + lane % 4 * 2 + i % 2];
            int key = first + 8 * (i / 2) + lane / 4;
            if (key < seen.begin || key >= seen.end) s[0][n][i] = -infinity<float>();
        }
}

// dk = scale dS^T Q and dv = P^T dO, summed over the heads of a group: a block 64 keys of a key head, a warp 16 of them.
// Products are turned round, so that a warp's rows are keys and P^T and dS^T are left operands without a detour.
template <int D, class O>
DEVICE void backward_keys(const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* totals, const float* d_rows,
                          const int* runs, const int* spans, O* dk, O* dv, i64 queries, i64 keys, int heads, int group, float scale) {
    // Fewer queries at a time where both sums take half of the registers.
    constexpr int OWN = 64, PART = D > 96 ? 32 : 64, N = PART / 8, SIZE = HeadTile<D>::SIZE;
    DYNAMIC_SHARED(bf16, k_tile);
    SHARED(QueryFacts, facts, 2);
    bf16 *v_tile = k_tile + SIZE, *pairs = v_tile + SIZE;
    int kv_heads = heads / group, own_row = own_warp() * 16, column = own_lane_index() % 4 * 2;
    i64 tiles = ceil_div(keys, OWN), q_stride = i64(heads) * D, kv_stride = i64(kv_heads) * D;
    for (i64 item = blockIdx.x; item < tiles * kv_heads; item += gridDim.x) {
        i64 first = item / kv_heads * OWN;
        int kv = int(item % kv_heads), warp_first = int(first) + own_row;
        int begin = spans[2 * (first / OWN)], end = spans[2 * (first / OWN) + 1], steps = int(ceil_div(end - begin, OTHER)) * group;
        start_rows<D, OWN>(k_tile, k + kv * D, kv_stride, first, keys);
        start_rows<D, OWN>(v_tile, v + kv * D, kv_stride, first, keys);
        auto start_pair = [&](int step) {
            int query = begin + step / group * OTHER, head = kv * group + step % group, t = threadIdx.x;
            bf16* to = pairs + (step & 1) * 2 * SIZE;
            start_rows<D, OTHER>(to, q + head * D, q_stride, query, queries);
            start_rows<D, OTHER>(to + SIZE, dout + head * D, q_stride, query, queries);
            if (t < OTHER) {
                int row = query + t;
                QueryFacts& at = facts[step & 1];
                at.run[t] = run_of(runs, row, queries);
                at.total[t] = log_of_denominator(totals, row, queries, heads, head);
                at.delta[t] = row < queries ? d_rows[row * heads + head] : 0.0f;
            }
        };
        if (steps > 0) start_pair(0);
        cp_async_commit();
        float dk_sums[1][D / 8][4], dv_sums[1][D / 8][4];
        clear(dk_sums);
        clear(dv_sums);
        for (int step = 0; step < steps; step++) {
            cp_async_wait<0>();
            __syncthreads();
            if (step + 1 < steps) start_pair(step + 1);
            cp_async_commit();
            const QueryFacts& at = facts[step & 1];
            const bf16* tile = pairs + (step & 1) * 2 * SIZE;
            int count = min_of(OTHER, end - (begin + step / group * OTHER));
#pragma unroll 1
            for (int part = 0; part < count; part += PART) {
                const Run* run = at.run + part;
                int last = min_of(PART, count - part) - 1;
                if (run[0].begin >= warp_first + 16 || run[last].end <= warp_first) continue;
                const bf16 *q_part = tile + part * HeadTile<D>::ROW, *dout_part = q_part + SIZE;
                float p[1][N][4], ds[1][N][4];
                u32 operand[1][N / 2][4];
                product_nt<D, 1, N>(p, k_tile, own_row, q_part);
                bool sees_all = last == PART - 1 && run[last].begin <= warp_first && run[0].end >= warp_first + 16;
                if (!sees_all) hide_turned<N>(p, run, warp_first);
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        p[0][n][i] = exp2f(p[0][n][i] * (scale * LOG2_E) - at.total[part + 8 * n + column + i % 2]);
                as_operand<1, N>(operand, p);
                product_nn<D, 1, N>(dv_sums, operand, dout_part);
                product_nt<D, 1, N>(ds, v_tile, own_row, dout_part);
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) ds[0][n][i] = p[0][n][i] * (ds[0][n][i] - at.delta[part + 8 * n + column + i % 2]);
                as_operand<1, N>(operand, ds);
                product_nn<D, 1, N>(dk_sums, operand, q_part);
            }
        }
        float factor[2] = {scale, scale}, one[2] = {1, 1};
        write_rows<D, 1>(dk + kv * D, kv_stride, first + own_row, keys, dk_sums, factor);
        write_rows<D, 1>(dv + kv * D, kv_stride, first + own_row, keys, dv_sums, one);
        cp_async_wait<0>();
        __syncthreads();
    }
}

// ---- entries: columns of a head, m-tiles of a warp in the forward, type of the outputs
#define FOR_HEADS(D, M, O, OUT)                                                                                             \
    KERNEL __launch_bounds__(THREADS, 2) void attention_tc_forward_##D##_##OUT(                                             \
        const bf16* q, const bf16* k, const bf16* v, const bf16* sinks, const int* runs, O* out, float* lse, i64 queries,   \
        i64 keys, i64 heads, i64 group, float scale) {                                                                      \
        forward<D, M>(q, k, v, sinks, runs, out, lse, queries, keys, int(heads), int(group), scale);                        \
    }                                                                                                                       \
    EXPORT(attention_tc_forward_##D##_##OUT)                                                                                \
    KERNEL __launch_bounds__(THREADS, 2) void attention_tc_backward_queries_##D##_##OUT(                                    \
        const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* totals, const float* d_rows,            \
        const int* runs, O* dq, i64 queries, i64 keys, i64 heads, i64 group, float scale) {                                 \
        backward_queries<D>(dout, q, k, v, totals, d_rows, runs, dq, queries, keys, int(heads), int(group), scale);         \
    }                                                                                                                       \
    EXPORT(attention_tc_backward_queries_##D##_##OUT)                                                                       \
    KERNEL __launch_bounds__(THREADS, 2) void attention_tc_backward_keys_##D##_##OUT(                                       \
        const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* totals, const float* d_rows,            \
        const int* runs, const int* spans, O* dk, O* dv, i64 queries, i64 keys, i64 heads, i64 group, float scale) {        \
        backward_keys<D>(dout, q, k, v, totals, d_rows, runs, spans, dk, dv, queries, keys, int(heads), int(group), scale); \
    }                                                                                                                       \
    EXPORT(attention_tc_backward_keys_##D##_##OUT)

FOR_HEADS(64, 2, bf16, bf16)
FOR_HEADS(64, 2, float, f32)
FOR_HEADS(96, 2, bf16, bf16)
FOR_HEADS(96, 2, float, f32)
FOR_HEADS(128, 2, bf16, bf16)
FOR_HEADS(128, 2, float, f32)
