// Attention over packed documents for every element type and head size, on ordinary cores: tiles of 32 own rows by
// 64 others with the running softmax (forward), and the probabilities made again from the log-sum-exp (backward). No
// matrix of scores is in memory. bf16 with the usual head sizes goes over the tensor cores instead (attention_tc).
//
// Work with P visible pairs a head, h heads: forward 2 P h (d + dv) flops; backward once more the scores for each of
// its two kernels, P h (8 d + 6 dv). Bytes: q, out and lse once; k and v once a query tile (32 rows) and head, which
// caches hold; the floor is that of arithmetic. What a query sees is one run of keys [begin, end) in `runs`; both ends
// rise with the query, so a tile's keys are those from its first query's begin to its last one's end. `spans` names
// for every 32 keys the run of queries that see some of them. dk and dv are summed by the block that owns the keys,
// query tile by query tile and in each head by head: no atomics, the same bits every time.
//
// delta, merge and sinks are bound by memory: t h (2 dv s + 2 a), t h (3 dv + 3) a and t h (2 dv + 1) a bytes (s, a:
// bytes of an element and of an accumulator).

constexpr int OWN = 32, OTHER = 64, CHUNK = 32, THREADS = 128;
constexpr int CHUNK_ROW = CHUNK + 1, TILE_ROW = OTHER + 1;

// Rows of one head of a tensor [rows, heads, width]; outside it is zero.
template <class T> struct Head {
    const T* data;
    i64 stride, rows;
    int width;
    DEVICE_MEMBER Head(const T* tensor, i64 rows, int heads, int head, int width)
        : data(tensor + i64(head) * width), stride(i64(heads) * width), rows(rows), width(width) {}
    DEVICE_MEMBER acc_t<T> at(i64 row, int column) const {
        return row < rows && column < width ? to_acc(data[row * stride + column]) : acc_t<T>(0);
    }
};


// The thread's place in a tile: own rows 4 y + i, others x + 16 j. The 16 threads of a row are half a warp.
DEVICE int tile_x() { return threadIdx.x & 15; }
DEVICE int tile_y() { return threadIdx.x >> 4; }

// sum[i][j] = row (own_first + 4 y + i) . row (other_first + x + 16 j) over the width.
template <class A, class X, class Y>
DEVICE void product_nt(A (&sum)[4][4], const X& own, i64 own_first, const Y& other, i64 other_first, int width, A* chunks) {
    A *own_chunk = chunks, *other_chunk = chunks + OWN * CHUNK_ROW;
    #pragma unroll
    for (int i = 0; i < 4; i++)
        #pragma unroll
        for (int j = 0; j < 4; j++) sum[i][j] = 0;
    for (int start = 0; start < width; start += CHUNK) {
        for (int e = threadIdx.x; e < OWN * CHUNK; e += THREADS)
            own_chunk[e / CHUNK * CHUNK_ROW + e % CHUNK] = own.at(own_first + e / CHUNK, start + e % CHUNK);
        for (int e = threadIdx.x; e < OTHER * CHUNK; e += THREADS)
            other_chunk[e / CHUNK * CHUNK_ROW + e % CHUNK] = other.at(other_first + e / CHUNK, start + e % CHUNK);
        __syncthreads();
        int count = min_of(CHUNK, width - start);
        for (int w = 0; w < count; w++) {
            A a[4], b[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) a[i] = own_chunk[(4 * tile_y() + i) * CHUNK_ROW + w];
            #pragma unroll
            for (int j = 0; j < 4; j++) b[j] = other_chunk[(tile_x() + 16 * j) * CHUNK_ROW + w];
            #pragma unroll
            for (int i = 0; i < 4; i++)
                #pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
}

// out [OWN, width] += tile [OWN, OTHER] rows (other_first ..); a thread adds to its own rows and to columns x + 16 j,
// always the same ones. Begins with a barrier between the writing of the tile and its use.
template <class A, class Y>
DEVICE void product_nn(A* out, const A* tile, const Y& other, i64 other_first, int width, A* chunks) {
    for (int start = 0; start < width; start += CHUNK) {
        for (int e = threadIdx.x; e < OTHER * CHUNK; e += THREADS)
            chunks[e / CHUNK * CHUNK_ROW + e % CHUNK] = other.at(other_first + e / CHUNK, start + e % CHUNK);
        __syncthreads();
        A sum[4][2] = {};
        for (int k = 0; k < OTHER; k++) {
            A a[4], b[2];
            #pragma unroll
            for (int i = 0; i < 4; i++) a[i] = tile[(4 * tile_y() + i) * TILE_ROW + k];
            #pragma unroll
            for (int j = 0; j < 2; j++) b[j] = chunks[k * CHUNK_ROW + tile_x() + 16 * j];
            #pragma unroll
            for (int i = 0; i < 4; i++)
                #pragma unroll
                for (int j = 0; j < 2; j++) sum[i][j] += a[i] * b[j];
        }
        #pragma unroll
        for (int i = 0; i < 4; i++)
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                int column = start + tile_x() + 16 * j;
                if (column < width) out[(4 * tile_y() + i) * width + column] += sum[i][j];
            }
        __syncthreads();
    }
}

template <class A> DEVICE void clear_rows(A* out, int width) {
    #pragma unroll
    for (int i = 0; i < 4; i++)
        for (int c = tile_x(); c < width; c += 16) out[(4 * tile_y() + i) * width + c] = 0;
}
// Writes the thread's part of out [OWN, width] to rows first .. of a head of to [rows, heads, width].
template <class O, class A>
DEVICE void write_rows(O* to, i64 rows, int heads, int head, int width, i64 first, const A* out, const A (&factor)[4]) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        i64 row = first + 4 * tile_y() + i;
        if (row >= rows) return;
        O* at = to + (row * heads + head) * width;
        for (int c = tile_x(); c < width; c += 16) at[c] = from_acc<O>(out[(4 * tile_y() + i) * width + c] * factor[i]);
    }
}
template <class A> DEVICE A half_warp_sum(A x) {
    for (int distance = 8; distance > 0; distance >>= 1) x += __shfl_xor_sync(WHOLE_WARP, x, distance);
    return x;
}
template <class A> DEVICE A half_warp_max(A x) {
    for (int distance = 8; distance > 0; distance >>= 1) x = max_of(x, __shfl_xor_sync(WHOLE_WARP, x, distance));
    return x;
}
// ln(e^a + e^b), exact where one is -inf.
template <class A> DEVICE A log_add_exp(A a, A b) {
    A low = a > b ? b : a, high = a > b ? a : b;
    return low == -infinity<A>() ? high : high + log1p_of(exp_of(low - high));
}

struct Run {
    int begin, end;
    DEVICE_MEMBER bool holds(i64 row) const { return row >= begin && row < end; }
};
DEVICE Run run_of(const int* runs, i64 row, i64 rows) {
    Run run = {0, 0};
    if (row < rows) run = {runs[2 * row], runs[2 * row + 1]};
    return run;
}
// Keys between the first begin and the last end of a tile of queries.
DEVICE Run keys_of(const int* runs, i64 first, i64 rows, int tile) {
    i64 last = min_of(first + tile, rows) - 1;
    return {runs[2 * first], runs[2 * last + 1]};
}

// ---- forward: out [queries, heads, dv], lse [queries, heads]
template <class T, class O>
DEVICE void forward(const T* q, const T* k, const T* v, const T* sinks, const int* runs, O* out, acc_t<T>* lse, i64 queries,
                    i64 keys, int heads, int group, int d, int dv, acc_t<T> scale) {
    typedef acc_t<T> A;
    DYNAMIC_SHARED(A, chunks);
    A *tile = chunks + (OWN + OTHER) * CHUNK_ROW, *sums = tile + OWN * TILE_ROW;
    i64 tiles = ceil_div(queries, OWN);
    for (i64 item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
        // The last queries see most: they go first.
        i64 first = (tiles - 1 - item / heads) * OWN;
        int head = int(item % heads);
        Head<T> own(q, queries, heads, head, d), key_rows(k, keys, heads / group, head / group, d);
        Head<T> value_rows(v, keys, heads / group, head / group, dv);
        Run run[4];
        A largest[4], sum[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            run[i] = run_of(runs, first + 4 * tile_y() + i, queries);
            largest[i] = -infinity<A>();
            sum[i] = 0;
        }
        clear_rows(sums, dv);
        Run seen = keys_of(runs, first, queries, OWN);
        for (i64 key = seen.begin; key < seen.end; key += OTHER) {
            A s[4][4];
            product_nt(s, own, first, key_rows, key, d, chunks);
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                A best = largest[i];
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    s[i][j] = run[i].holds(key + tile_x() + 16 * j) ? s[i][j] * scale : -infinity<A>();
                    best = max_of(best, s[i][j]);
                }
                best = half_warp_max(best);
                A total = 0, shrink = best == largest[i] ? A(1) : exp_of(largest[i] - best);
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    A p = s[i][j] == -infinity<A>() ? A(0) : exp_of(s[i][j] - best);
                    tile[(4 * tile_y() + i) * TILE_ROW + tile_x() + 16 * j] = p;
                    total += p;
                }
                sum[i] = sum[i] * shrink + half_warp_sum(total);
                largest[i] = best;
                if (shrink != A(1))
                    for (int c = tile_x(); c < dv; c += 16) sums[(4 * tile_y() + i) * dv + c] *= shrink;
            }
            product_nn(sums, tile, value_rows, key, dv, chunks);
        }
        A factor[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            i64 row = first + 4 * tile_y() + i;
            A total = sum[i] == A(0) ? -infinity<A>() : largest[i] + log_of(sum[i]);
            factor[i] = sum[i] == A(0) ? A(0) : A(1) / sum[i];
            if (sinks && sum[i] != A(0)) factor[i] *= exp_of(total - log_add_exp(total, to_acc(sinks[head])));
            if (tile_x() == 0 && row < queries) lse[row * heads + head] = total;
        }
        write_rows(out, queries, heads, head, dv, first, sums, factor);
        __syncthreads();
    }
}

// ---- backward
// d_rows = rowsum(dO O) and totals = ln(e^lse + e^sink), both [rows, heads]; a warp a row and head.
template <class T>
DEVICE void delta(const T* dout, const T* out, const acc_t<T>* lse, const T* sinks, acc_t<T>* totals, acc_t<T>* d_rows, i64 rows,
                  int heads, int dv) {
    typedef acc_t<T> A;
    i64 stride = i64(gridDim.x) * (blockDim.x >> 5);
    int lane = threadIdx.x & 31;
    int packs = is_aligned_16(dout) && is_aligned_16(out) && dv % Pack<T>::COUNT == 0 ? dv / Pack<T>::COUNT : 0;
    for (i64 row = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5); row < rows * heads; row += stride) {
        const T *a = dout + row * dv, *b = out + row * dv;
        A sum = 0;
        for (int p = lane; p < packs; p += 32) {
            Pack<T> x = load_pack(a + p * Pack<T>::COUNT), y = load_pack(b + p * Pack<T>::COUNT);
            for (int i = 0; i < Pack<T>::COUNT; i++) sum += to_acc(x.v[i]) * to_acc(y.v[i]);
        }
        for (int c = packs * Pack<T>::COUNT + lane; c < dv; c += 32) sum += to_acc(a[c]) * to_acc(b[c]);
        sum = warp_sum(sum);
        if (lane == 0) {
            d_rows[row] = sum;
            totals[row] = sinks ? log_add_exp(lse[row], to_acc(sinks[row % heads])) : lse[row];
        }
    }
}

// dsinks[h] = - sum over rows of e^(sink - total) D; a block a head.
template <class T>
DEVICE void sink_gradients(const T* sinks, const acc_t<T>* totals, const acc_t<T>* d_rows, acc_t<T>* dsinks, i64 rows, int heads) {
    typedef acc_t<T> A;
    SHARED(A, scratch, 32);
    for (int head = blockIdx.x; head < heads; head += gridDim.x) {
        A sink = to_acc(sinks[head]), sum = 0;
        for (i64 row = threadIdx.x; row < rows; row += blockDim.x) sum += exp_of(sink - totals[row * heads + head]) * d_rows[row * heads + head];
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0) dsinks[head] = A(0) - sum;
    }
}

// dS = P (dP - D) of one score. A probability of one leaves nothing to the other keys: D is dP, and their difference is
// noise of two sums in different orders where the gradient is zero.
template <class A> DEVICE A score_gradient(A p, A dp, A delta) {
    constexpr A NOISE = sizeof(A) == 8 ? A(4e-15) : A(5e-7);
    bool is_certain = p > A(1) - NOISE && p < A(1) + NOISE;
    return p == A(0) || is_certain ? A(0) : p * (dp - delta);
}

// dq [queries, heads, d] = scale dS K with dS = P (dO V^T - D): a block 32 queries of a head.
template <class T, class O>
DEVICE void backward_queries(const T* dout, const T* q, const T* k, const T* v, const acc_t<T>* totals, const acc_t<T>* d_rows,
                             const int* runs, O* dq, i64 queries, i64 keys, int heads, int group, int d, int dv, acc_t<T> scale) {
    typedef acc_t<T> A;
    DYNAMIC_SHARED(A, chunks);
    A *tile = chunks + (OWN + OTHER) * CHUNK_ROW, *sums = tile + OWN * TILE_ROW;
    i64 tiles = ceil_div(queries, OWN);
    for (i64 item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
        i64 first = (tiles - 1 - item / heads) * OWN;
        int head = int(item % heads);
        Head<T> own(q, queries, heads, head, d), gradients(dout, queries, heads, head, dv);
        Head<T> key_rows(k, keys, heads / group, head / group, d), value_rows(v, keys, heads / group, head / group, dv);
        Run run[4];
        A total[4], delta[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            i64 row = first + 4 * tile_y() + i;
            run[i] = run_of(runs, row, queries);
            total[i] = row < queries ? totals[row * heads + head] : A(0);
            delta[i] = row < queries ? d_rows[row * heads + head] : A(0);
        }
        clear_rows(sums, d);
        Run seen = keys_of(runs, first, queries, OWN);
        for (i64 key = seen.begin; key < seen.end; key += OTHER) {
            A s[4][4], dp[4][4];
            product_nt(s, own, first, key_rows, key, d, chunks);
            product_nt(dp, gradients, first, value_rows, key, dv, chunks);
            #pragma unroll
            for (int i = 0; i < 4; i++)
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    A p = run[i].holds(key + tile_x() + 16 * j) ? exp_of(s[i][j] * scale - total[i]) : A(0);
                    tile[(4 * tile_y() + i) * TILE_ROW + tile_x() + 16 * j] = score_gradient(p, dp[i][j], delta[i]);
                }
            product_nn(sums, tile, key_rows, key, d, chunks);
        }
        A factor[4] = {scale, scale, scale, scale};
        write_rows(dq, queries, heads, head, d, first, sums, factor);
        __syncthreads();
    }
}

// dk [keys, kv_heads, d] = scale dS^T Q and dv [keys, kv_heads, dv] = P^T dO, summed over the heads of a group: a block
// 32 keys of a key head. One of dk and dv may be null: then it is left out.
template <class T, class O>
DEVICE void backward_keys(const T* dout, const T* q, const T* k, const T* v, const acc_t<T>* totals, const acc_t<T>* d_rows,
                          const int* runs, const int* spans, O* dk, O* dvalues, i64 queries, i64 keys, int heads, int group, int d,
                          int dv, acc_t<T> scale) {
    typedef acc_t<T> A;
    DYNAMIC_SHARED(A, chunks);
    A *tile = chunks + (OWN + OTHER) * CHUNK_ROW, *dk_sums = tile + OWN * TILE_ROW, *dv_sums = dk_sums + (dk ? OWN * d : 0);
    int kv_heads = heads / group;
    i64 tiles = ceil_div(keys, OWN);
    for (i64 item = blockIdx.x; item < tiles * kv_heads; item += gridDim.x) {
        i64 first = item / kv_heads * OWN;
        int kv = int(item % kv_heads);
        Head<T> key_rows(k, keys, kv_heads, kv, d), value_rows(v, keys, kv_heads, kv, dv);
        if (dk) clear_rows(dk_sums, d);
        if (dvalues) clear_rows(dv_sums, dv);
        Run seen = {spans[2 * (first / OWN)], spans[2 * (first / OWN) + 1]};
        for (i64 query = seen.begin; query < seen.end; query += OTHER)
            for (int head = kv * group; head < (kv + 1) * group; head++) {
                Head<T> query_rows(q, queries, heads, head, d), gradients(dout, queries, heads, head, dv);
                A p[4][4], ds[4][4];
                product_nt(p, key_rows, first, query_rows, query, d, chunks);
                if (dk) product_nt(ds, value_rows, first, gradients, query, dv, chunks);
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    i64 row = query + tile_x() + 16 * j;
                    Run run = run_of(runs, row, queries);
                    A total = row < queries ? totals[row * heads + head] : A(0), delta = row < queries ? d_rows[row * heads + head] : A(0);
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        p[i][j] = run.holds(first + 4 * tile_y() + i) ? exp_of(p[i][j] * scale - total) : A(0);
                        tile[(4 * tile_y() + i) * TILE_ROW + tile_x() + 16 * j] = p[i][j];
                        if (dk) ds[i][j] = score_gradient(p[i][j], ds[i][j], delta);
                    }
                }
                if (dvalues) product_nn(dv_sums, tile, gradients, query, dv, chunks);
                if (dk) {
                    #pragma unroll
                    for (int i = 0; i < 4; i++)
                        #pragma unroll
                        for (int j = 0; j < 4; j++) tile[(4 * tile_y() + i) * TILE_ROW + tile_x() + 16 * j] = ds[i][j];
                    product_nn(dk_sums, tile, query_rows, query, d, chunks);
                }
            }
        A scales[4] = {scale, scale, scale, scale}, ones[4] = {1, 1, 1, 1};
        if (dk) write_rows(dk, keys, kv_heads, kv, d, first, dk_sums, scales);
        if (dvalues) write_rows(dvalues, keys, kv_heads, kv, dv, first, dv_sums, ones);
        __syncthreads();
    }
}

// ---- parts
// out = (e^la a + e^lb b) / (e^la + e^lb), lse = ln(e^la + e^lb), a warp a row and head. A part whose lse is -inf counts
// for nothing, whatever its output holds.
template <class A>
DEVICE void merge(const A* a, const A* lse_a, const A* b, const A* lse_b, A* out, A* lse, i64 rows, int dv) {
    i64 stride = i64(gridDim.x) * (blockDim.x >> 5);
    for (i64 row = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5); row < rows; row += stride) {
        A la = lse_a[row], lb = lse_b[row], total = log_add_exp(la, lb);
        bool no_a = la == -infinity<A>(), no_b = lb == -infinity<A>();
        A wa = exp_of(la - total), wb = exp_of(lb - total);
        for (int c = threadIdx.x & 31; c < dv; c += 32) {
            A x = a[row * dv + c], y = b[row * dv + c];
            out[row * dv + c] = no_a ? (no_b ? A(0) : y) : (no_b ? x : wa * x + wb * y);
        }
        if ((threadIdx.x & 31) == 0) lse[row] = total;
    }
}

// out *= e^lse / (e^lse + e^sink) in place, a warp a row and head.
template <class T> DEVICE void apply_sinks(acc_t<T>* out, const acc_t<T>* lse, const T* sinks, i64 rows, int heads, int dv) {
    typedef acc_t<T> A;
    i64 stride = i64(gridDim.x) * (blockDim.x >> 5);
    for (i64 row = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5); row < rows * heads; row += stride) {
        A own = lse[row];
        if (own == -infinity<A>()) continue;
        A factor = exp_of(own - log_add_exp(own, to_acc(sinks[row % heads])));
        for (int c = threadIdx.x & 31; c < dv; c += 32) out[row * dv + c] *= factor;
    }
}

// ---- entries: element type, and that of outputs that parts may need in the accumulator type
#define FOR_OUTPUTS(T, TYPE, O, OUT)                                                                                              \
    KERNEL __launch_bounds__(THREADS, 2) void attention_forward_##TYPE##_##OUT(                                                      \
        const T* q, const T* k, const T* v, const T* sinks, const int* runs, O* out, acc_t<T>* lse, i64 queries, i64 keys,        \
        i64 heads, i64 group, i64 d, i64 dv, acc_t<T> scale) {                                                                    \
        forward(q, k, v, sinks, runs, out, lse, queries, keys, int(heads), int(group), int(d), int(dv), scale);                   \
    }                                                                                                                             \
    EXPORT(attention_forward_##TYPE##_##OUT)                                                                                      \
    KERNEL __launch_bounds__(THREADS, 2) void attention_backward_queries_##TYPE##_##OUT(                                             \
        const T* dout, const T* q, const T* k, const T* v, const acc_t<T>* totals, const acc_t<T>* d_rows, const int* runs,       \
        O* dq, i64 queries, i64 keys, i64 heads, i64 group, i64 d, i64 dv, acc_t<T> scale) {                                      \
        backward_queries(dout, q, k, v, totals, d_rows, runs, dq, queries, keys, int(heads), int(group), int(d), int(dv), scale); \
    }                                                                                                                             \
    EXPORT(attention_backward_queries_##TYPE##_##OUT)                                                                             \
    KERNEL __launch_bounds__(THREADS, 2) void attention_backward_keys_##TYPE##_##OUT(                                                \
        const T* dout, const T* q, const T* k, const T* v, const acc_t<T>* totals, const acc_t<T>* d_rows, const int* runs,       \
        const int* spans, O* dk, O* dvalues, i64 queries, i64 keys, i64 heads, i64 group, i64 d, i64 dv, acc_t<T> scale) {        \
        backward_keys(dout, q, k, v, totals, d_rows, runs, spans, dk, dvalues, queries, keys, int(heads), int(group), int(d),     \
                      int(dv), scale);                                                                                            \
    }                                                                                                                             \
    EXPORT(attention_backward_keys_##TYPE##_##OUT)

#define FOR_TYPE(T, TYPE)                                                                                                     \
    KERNEL __launch_bounds__(256) void attention_delta_##TYPE(const T* dout, const T* out, const acc_t<T>* lse, const T* sinks, \
                                                              acc_t<T>* totals, acc_t<T>* d_rows, i64 rows, i64 heads, i64 dv) { \
        delta(dout, out, lse, sinks, totals, d_rows, rows, int(heads), int(dv));                                              \
    }                                                                                                                         \
    EXPORT(attention_delta_##TYPE)                                                                                            \
    KERNEL __launch_bounds__(256) void attention_sink_gradients_##TYPE(const T* sinks, const acc_t<T>* totals,                \
                                                                       const acc_t<T>* d_rows, acc_t<T>* dsinks, i64 rows,    \
                                                                       i64 heads) {                                           \
        sink_gradients(sinks, totals, d_rows, dsinks, rows, int(heads));                                                      \
    }                                                                                                                         \
    EXPORT(attention_sink_gradients_##TYPE)                                                                                   \
    KERNEL __launch_bounds__(256) void attention_apply_sinks_##TYPE(acc_t<T>* out, const acc_t<T>* lse, const T* sinks,       \
                                                                    i64 rows, i64 heads, i64 dv) {                            \
        apply_sinks(out, lse, sinks, rows, int(heads), int(dv));                                                              \
    }                                                                                                                         \
    EXPORT(attention_apply_sinks_##TYPE)

#define MERGE(A, TYPE)                                                                                                  \
    KERNEL __launch_bounds__(256, 2) void attention_merge_##TYPE(const A* a, const A* lse_a, const A* b, const A* lse_b, A* out, \
                                                              A* lse, i64 rows, i64 dv) {                               \
        merge(a, lse_a, b, lse_b, out, lse, rows, int(dv));                                                             \
    }                                                                                                                   \
    EXPORT(attention_merge_##TYPE)

FOR_OUTPUTS(float, f32, float, f32)
FOR_OUTPUTS(double, f64, double, f64)
FOR_OUTPUTS(bf16, bf16, bf16, bf16)
FOR_OUTPUTS(bf16, bf16, float, f32)
FOR_TYPE(float, f32)
FOR_TYPE(double, f64)
FOR_TYPE(bf16, bf16)
MERGE(float, f32)
MERGE(double, f64)
