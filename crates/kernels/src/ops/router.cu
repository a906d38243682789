// The router of a mixture-of-experts layer; a warp a token row, whose passes over its e logits are read from memory
// once and then from the nearest cache. Bytes moved (s bytes an element):
//   choose             t (e s + 4 k)          scores in shared memory, k searches there
//   weights            t (e s + k (4 + s))    softmax over all; else t k (4 + 2 s)
//   backward           t (2 e s + k (4 + s))  weights, balance and z-loss in one pass; every logit's gradient written
//   rows, sums         t (2 e s + 64) + c e 8 twice, for c = t / 32 chunks of rows; sums over tokens in f64
// The floor is that over the memory's bandwidth.

enum Function { SOFTMAX = 0, SIGMOID = 1, SQRT_SOFTPLUS = 2, LOGIT = 3 };

template <class A> DEVICE A sigmoid_of(A x) {
    if (x >= A(0)) return A(1) / (A(1) + exp_of(-x));
    A e = exp_of(x);
    return e / (A(1) + e);
}
template <class A> DEVICE A softplus_of(A x) {
    A magnitude = x < A(0) ? -x : x;
    return max_of(x, A(0)) + log1p_of(exp_of(-magnitude));
}
// Score of one logit; the softmax goes by the row's largest logit and its sum.
template <class A> DEVICE A score_of(i64 function, A x, A largest, A sum) {
    if (function == SOFTMAX) return exp_of(x - largest) / sum;
    if (function == SIGMOID) return sigmoid_of(x);
    if (function == SQRT_SOFTPLUS) return sqrt_of(softplus_of(x));
    return x;
}
// Derivative of a score by its own logit, where each expert is scored for itself.
template <class A> DEVICE A slope_of(i64 function, A x, A score) {
    if (function == SIGMOID) return score * (A(1) - score);
    return score > A(0) ? sigmoid_of(x) / (score + score) : A(0);
}
DEVICE double sum_epsilon() { return 1e-20; }

// Largest logit of a row, and the sum of exponentials relative to it.
template <class A> struct Softmax {
    A largest, sum;
};
template <class A> DEVICE Softmax<A> softmax_of_row(const A* row, i64 experts, int lane) {
    Softmax<A> r;
    r.largest = -infinity<A>();
    for (i64 e = lane; e < experts; e += 32) r.largest = max_of(r.largest, row[e]);
    r.largest = warp_max(r.largest);
    r.sum = A(0);
    for (i64 e = lane; e < experts; e += 32) r.sum += exp_of(row[e] - r.largest);
    r.sum = warp_sum(r.sum);
    return r;
}

// Whether a row holds a NaN, or its largest value is not finite; the same on all lanes.
template <class A> DEVICE bool unrankable(const A* row, i64 experts, int lane) {
    bool bad = false, finite = false;
    for (i64 e = lane; e < experts; e += 32) {
        A x = row[e];
        bad |= x != x || x == infinity<A>();
        finite |= x - x == A(0);
    }
    return __any_sync(WHOLE_WARP, bad) || !__any_sync(WHOLE_WARP, finite);
}

// The best behind `last` of n values (of shared memory), those of groups that are not kept left out.
template <class A>
DEVICE Ranked<A> next_best(const A* values, i64 n, const int* kept, i64 group_size, int lane, Ranked<A> last) {
    Ranked<A> best = behind_all<A>();
    for (i64 i = lane; i < n; i += 32) {
        if (kept && !kept[i / group_size]) continue;
        Ranked<A> one;
        one.value = values[i];
        one.index = int(i);
        if (precedes(last, one) && precedes(one, best)) best = one;
    }
    return warp_first(best);
}

// Sum of the `count` largest of n values, in falling order.
template <class A> DEVICE A sum_of_best(const A* values, i64 n, i64 count) {
    Ranked<A> last = before_all<A>();
    A sum = A(0);
    for (i64 j = 0; j < count; j++) {
        Ranked<A> best = behind_all<A>();
        for (i64 i = 0; i < n; i++) {
            Ranked<A> one;
            one.value = values[i];
            one.index = int(i);
            if (precedes(last, one) && precedes(one, best)) best = one;
        }
        last = best;
        sum += best.value;
    }
    return sum;
}

// Shared memory of a warp: scores [e], scores of groups [g], marks of kept groups [g].
template <class A>
DEVICE void choose(const A* logits, const A* shift, const A* bias, const u8* padding, int* ids, int* first_bad, i64 tokens,
                   i64 experts, i64 k, i64 function, i64 groups, i64 keep, i64 score_k, i64 warp_bytes) {
    DYNAMIC_SHARED(u8, memory);
    int lane = int(threadIdx.x) & 31;
    u8* own_memory = memory + (threadIdx.x >> 5) * warp_bytes;
    A* ranked = reinterpret_cast<A*>(own_memory);
    A* group_scores = ranked + experts;
    int* kept = reinterpret_cast<int*>(group_scores + groups);
    i64 group_size = groups ? experts / groups : experts;
    i64 warps = i64(gridDim.x) * (blockDim.x >> 5);
    for (i64 t = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5); t < tokens; t += warps) {
        const A* row = logits + t * experts;
        bool empty = padding && padding[t];
        bool bad = !empty && unrankable(row, experts, lane);
        if (bad && lane == 0) atomicMin(first_bad, int(t));
        if (empty || bad) {
            for (i64 j = lane; j < k; j += 32) ids[t * k + j] = -1;
            continue;
        }
        for (i64 e = lane; e < experts; e += 32) ranked[e] = shift ? row[e] + shift[e] : row[e];
        __syncwarp();
        Softmax<A> softmax = {A(0), A(1)};
        if (function == SOFTMAX) softmax = softmax_of_row(ranked, experts, lane);
        for (i64 e = lane; e < experts; e += 32) {
            A score = score_of(function, ranked[e], softmax.largest, softmax.sum);
            ranked[e] = bias ? score + bias[e] : score;
        }
        __syncwarp();
        if (groups) {
            for (i64 g = lane; g < groups; g += 32) {
                group_scores[g] = sum_of_best(ranked + g * group_size, group_size, score_k);
                kept[g] = 0;
            }
            __syncwarp();
            Ranked<A> last = before_all<A>();
            for (i64 j = 0; j < keep; j++) {
                last = next_best<A>(group_scores, groups, nullptr, 1, lane, last);
                if (lane == 0 && last.index < groups) kept[last.index] = 1;
            }
            __syncwarp();
        }
        Ranked<A> last = before_all<A>();
        int own = -1;
        for (i64 j = 0; j < k; j++) {
            last = next_best(ranked, experts, groups ? kept : nullptr, group_size, lane, last);
            // A lane keeps one winner of 32, so that they are written together.
            if (lane == int(j & 31)) own = last.index;
            if (((j & 31) == 31 || j == k - 1) && lane <= int(j & 31)) ids[t * k + (j & ~i64(31)) + lane] = own;
        }
        // The next row writes where this one reads.
        __syncwarp();
    }
}

template <class A> DEVICE void level(A* logits, const u8* padding, int* count, i64 tokens, i64 experts) {
    int lane = int(threadIdx.x) & 31;
    i64 warps = i64(gridDim.x) * (blockDim.x >> 5);
    for (i64 t = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5); t < tokens; t += warps) {
        if (padding && padding[t]) continue;
        A* row = logits + t * experts;
        if (!unrankable(row, experts, lane)) continue;
        for (i64 e = lane; e < experts; e += 32) row[e] = A(0);
        if (lane == 0) atomicAdd(count, 1);
    }
}

// The softmax that the weights of a row go by: over all experts, or over the chosen ones.
template <class A>
DEVICE Softmax<A> softmax_of_weights(const A* row, const int* ids, i64 experts, i64 k, i64 function, i64 after, int lane) {
    Softmax<A> r = {A(0), A(1)};
    if (function != SOFTMAX) return r;
    if (!after) return softmax_of_row(row, experts, lane);
    r.largest = -infinity<A>();
    for (i64 j = lane; j < k; j += 32)
        if (ids[j] >= 0) r.largest = max_of(r.largest, row[ids[j]]);
    r.largest = warp_max(r.largest);
    r.sum = A(0);
    for (i64 j = lane; j < k; j += 32)
        if (ids[j] >= 0) r.sum += exp_of(row[ids[j]] - r.largest);
    r.sum = warp_sum(r.sum);
    return r;
}

template <class A>
DEVICE void weights(const A* logits, const int* all_ids, A* out, i64 tokens, i64 experts, i64 k, i64 function, i64 after,
                    i64 renormalize, A scale) {
    int lane = int(threadIdx.x) & 31;
    i64 warps = i64(gridDim.x) * (blockDim.x >> 5);
    for (i64 t = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5); t < tokens; t += warps) {
        const A* row = logits + t * experts;
        const int* ids = all_ids + t * k;
        Softmax<A> softmax = softmax_of_weights(row, ids, experts, k, function, after, lane);
        A sum = A(0);
        for (i64 j = lane; j < k; j += 32)
            if (ids[j] >= 0) sum += score_of(function, row[ids[j]], softmax.largest, softmax.sum);
        sum = warp_sum(sum) + A(sum_epsilon());
        for (i64 j = lane; j < k; j += 32) {
            A weight = A(0);
            if (ids[j] >= 0) {
                weight = score_of(function, row[ids[j]], softmax.largest, softmax.sum);
                if (renormalize) weight /= sum;
                weight *= scale;
            }
            out[t * k + j] = weight;
        }
    }
}

// Gradient of the logits; `slopes` [s, e] is null where no loss has any, `padding` where no row is padding.
template <class A>
DEVICE void backward(const A* logits, const int* all_ids, const A* all_dweights, const int* sequence, const u8* padding,
                     const A* all_slopes, A* all_dlogits, i64 tokens, i64 experts, i64 k, i64 function, i64 after,
                     i64 renormalize, A scale, A twice_z_slope) {
    int lane = int(threadIdx.x) & 31;
    i64 warps = i64(gridDim.x) * (blockDim.x >> 5);
    for (i64 t = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5); t < tokens; t += warps) {
        const A* row = logits + t * experts;
        const int* ids = all_ids + t * k;
        const A* dweights = all_dweights + t * k;
        A* dlogits = all_dlogits + t * experts;
        bool any = false;
        for (i64 j = lane; j < k; j += 32) any |= ids[j] >= 0 && dweights[j] != A(0);
        bool weighs = __any_sync(WHOLE_WARP, any), counts = !(padding && padding[t]);
        const A* slopes = counts && all_slopes ? all_slopes + i64(sequence[t]) * experts : nullptr;
        A z = counts ? twice_z_slope : A(0);
        // Softmax over all: of the scores themselves, or of the z-loss alone.
        Softmax<A> all = {A(0), A(1)};
        if ((function == SOFTMAX && ((weighs && !after) || slopes)) || z != A(0)) all = softmax_of_row(row, experts, lane);
        Softmax<A> used = all;
        if (weighs && after) used = softmax_of_weights(row, ids, experts, k, function, after, lane);
        // Through the weights: with r the scores of the chosen, sum r, then sum r dr.
        A sum = A(0), inner = A(0), through = A(0);
        if (weighs) {
            A dot = A(0);
            for (i64 j = lane; j < k; j += 32)
                if (ids[j] >= 0) {
                    A r = score_of(function, row[ids[j]], used.largest, used.sum);
                    sum += r;
                    dot += r * (dweights[j] * scale);
                }
            sum = warp_sum(sum) + A(sum_epsilon());
            inner = warp_sum(dot) / sum;
            if (function == SOFTMAX) {
                for (i64 j = lane; j < k; j += 32)
                    if (ids[j] >= 0) {
                        A dr = dweights[j] * scale;
                        if (renormalize) dr = (dr - inner) / sum;
                        through += score_of(function, row[ids[j]], used.largest, used.sum) * dr;
                    }
                through = warp_sum(through);
            }
        }
        // Through the normalised scores p: sum of slope p (softmax), or of slope s over sum s.
        A score_sum = A(0), mean = A(0);
        if (slopes) {
            for (i64 e = lane; e < experts; e += 32) {
                A s = score_of(function, row[e], all.largest, all.sum);
                score_sum += s;
                mean += slopes[e] * s;
            }
            score_sum = warp_sum(score_sum) + A(sum_epsilon());
            mean = warp_sum(mean);
            if (function != SOFTMAX) mean /= score_sum;
        }
        A z_factor = z != A(0) ? z * (all.largest + log_of(all.sum)) : A(0);
        for (i64 e = lane; e < experts; e += 32) {
            A d = A(0), x = row[e];
            if (weighs && function == SOFTMAX && !after) d -= score_of(function, x, all.largest, all.sum) * through;
            if (slopes) {
                A s = score_of(function, x, all.largest, all.sum);
                d += function == SOFTMAX ? s * (slopes[e] - mean) : (slopes[e] - mean) / score_sum * slope_of(function, x, s);
            }
            if (z != A(0)) d += z_factor * score_of<A>(SOFTMAX, x, all.largest, all.sum);
            dlogits[e] = d;
        }
        __syncwarp();
        if (!weighs) continue;
        for (i64 j = lane; j < k; j += 32)
            if (ids[j] >= 0) {
                A x = row[ids[j]], r = score_of(function, x, used.largest, used.sum), dr = dweights[j] * scale;
                if (renormalize) dr = (dr - inner) / sum;
                A d = function != SOFTMAX ? dr * slope_of(function, x, r) : after ? r * (dr - through) : r * dr;
                dlogits[ids[j]] += d;
            }
    }
}

// Of each row: largest logit, divisor of its scores, log-sum-exp squared, entropy of the normalised scores; and its
// plain k picks counted by sequence and expert. Shared memory of a warp: normalised scores [e].
template <class A>
DEVICE void rows(const A* logits, const int* sequence, const u8* padding, int* counts_se, double* of_rows, i64 tokens,
                 i64 experts, i64 k, i64 function, i64 warp_bytes) {
    DYNAMIC_SHARED(u8, memory);
    int lane = int(threadIdx.x) & 31;
    A* p = reinterpret_cast<A*>(memory + (threadIdx.x >> 5) * warp_bytes);
    i64 warps = i64(gridDim.x) * (blockDim.x >> 5);
    for (i64 t = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5); t < tokens; t += warps) {
        if (padding && padding[t]) {
            if (lane < 4) of_rows[t * 4 + lane] = 0;
            continue;
        }
        const A* row = logits + t * experts;
        Softmax<A> softmax = softmax_of_row(row, experts, lane);
        A sum = A(0);
        for (i64 e = lane; e < experts; e += 32) {
            p[e] = score_of(function, row[e], softmax.largest, softmax.sum);
            sum += p[e];
        }
        A divisor = softmax.sum;
        if (function != SOFTMAX) divisor = warp_sum(sum) + A(sum_epsilon());
        double entropy = 0;
        for (i64 e = lane; e < experts; e += 32) {
            if (function != SOFTMAX) p[e] /= divisor;
            double share = double(p[e]);
            if (share > 0) entropy -= share * log(share);
        }
        entropy = warp_sum(entropy);
        __syncwarp();
        Ranked<A> last = before_all<A>();
        for (i64 j = 0; j < k; j++) {
            last = next_best<A>(p, experts, nullptr, 1, lane, last);
            if (lane == 0 && last.index < experts) atomicAdd(&counts_se[i64(sequence[t]) * experts + last.index], 1);
        }
        double log_sum_exp = double(softmax.largest == -infinity<A>() ? softmax.largest : softmax.largest + log_of(softmax.sum));
        if (lane == 0) {
            of_rows[t * 4] = double(softmax.largest);
            of_rows[t * 4 + 1] = double(divisor);
            of_rows[t * 4 + 2] = log_sum_exp * log_sum_exp;
            of_rows[t * 4 + 3] = entropy;
        }
        __syncwarp();
    }
}

// Sums of one chunk of at most 32 rows of one sequence, a block each: normalised scores by expert, then log-sum-exp
// squared, entropy and the number of rows that are no padding: [c, e + 3]. `chunks` holds first row and number of rows.
template <class A>
DEVICE void chunk_sums(const A* logits, const u8* padding, const double* of_rows, const i64* chunks, double* sums,
                       i64 chunk_count, i64 experts, i64 function) {
    for (i64 c = blockIdx.x; c < chunk_count; c += gridDim.x) {
        i64 first = chunks[2 * c], count = chunks[2 * c + 1];
        double* out = sums + c * (experts + 3);
        for (i64 e = threadIdx.x; e < experts; e += blockDim.x) {
            double sum = 0;
            for (i64 t = first; t < first + count; t++) {
                if (padding && padding[t]) continue;
                A divisor = A(of_rows[t * 4 + 1]);
                A p = score_of(function, logits[t * experts + e], A(of_rows[t * 4]), divisor);
                sum += double(function == SOFTMAX ? p : p / divisor);
            }
            out[e] = sum;
        }
        if (threadIdx.x < 32) {
            i64 t = first + threadIdx.x;
            bool here = i64(threadIdx.x) < count && !(padding && padding[t]);
            double z = warp_sum(here ? of_rows[t * 4 + 2] : 0.0), entropy = warp_sum(here ? of_rows[t * 4 + 3] : 0.0);
            double rows_here = double(__popc(__ballot_sync(WHOLE_WARP, here)));
            if (threadIdx.x == 0) {
                out[experts] = z;
                out[experts + 1] = entropy;
                out[experts + 2] = rows_here;
            }
        }
    }
}

// Sums of each sequence over its chunks, in order, and its counts behind them: [s, 2 e + 3].
KERNEL __launch_bounds__(256) void router_totals(const double* chunk_sums, const i64* offsets, const int* counts_se, double* out,
                                                 i64 sequences, i64 experts) {
    i64 width = 2 * experts + 3, stride = i64(gridDim.x) * blockDim.x;
    for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < sequences * width; i += stride) {
        i64 s = i / width, column = i % width;
        double sum = 0;
        if (column >= experts + 3) {
            sum = double(counts_se[s * experts + column - experts - 3]);
        } else {
            for (i64 c = offsets[s]; c < offsets[s + 1]; c++) sum += chunk_sums[c * (experts + 3) + column];
        }
        out[i] = sum;
    }
}
EXPORT(router_totals)

#define ROUTER(A, TYPE)                                                                                                     \
    KERNEL __launch_bounds__(256, 2) void router_choose_##TYPE(const A* logits, const A* shift, const A* bias, const u8* padding, \
                                                            int* ids, int* first_bad, i64 t, i64 e, i64 k, i64 function,   \
                                                            i64 groups, i64 keep, i64 score_k, i64 warp_bytes) {           \
        choose(logits, shift, bias, padding, ids, first_bad, t, e, k, function, groups, keep, score_k, warp_bytes);        \
    }                                                                                                                      \
    EXPORT(router_choose_##TYPE)                                                                                           \
    KERNEL __launch_bounds__(256) void router_level_##TYPE(A* logits, const u8* padding, int* count, i64 t, i64 e) {       \
        level(logits, padding, count, t, e);                                                                               \
    }                                                                                                                      \
    EXPORT(router_level_##TYPE)                                                                                            \
    KERNEL __launch_bounds__(256, 2) void router_weights_##TYPE(const A* logits, const int* ids, A* out, i64 t, i64 e, i64 k, \
                                                             i64 function, i64 after, i64 renormalize, A scale) {          \
        weights(logits, ids, out, t, e, k, function, after, renormalize, scale);                                           \
    }                                                                                                                      \
    EXPORT(router_weights_##TYPE)                                                                                          \
    KERNEL __launch_bounds__(256) void router_mask_##TYPE(A* weights, const int* ids, i64 n) {                             \
        i64 stride = i64(gridDim.x) * blockDim.x;                                                                          \
        for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < n; i += stride)                                       \
            if (ids[i] < 0) weights[i] = A(0);                                                                             \
    }                                                                                                                      \
    EXPORT(router_mask_##TYPE)                                                                                             \
    KERNEL __launch_bounds__(256, 2) void router_backward_##TYPE(const A* logits, const int* ids, const A* dweights,          \
                                                              const int* sequence, const u8* padding, const A* slopes,     \
                                                              A* dlogits, i64 t, i64 e, i64 k, i64 function, i64 after,    \
                                                              i64 renormalize, A scale, A twice_z_slope) {                 \
        backward(logits, ids, dweights, sequence, padding, slopes, dlogits, t, e, k, function, after, renormalize, scale,  \
                 twice_z_slope);                                                                                           \
    }                                                                                                                      \
    EXPORT(router_backward_##TYPE)                                                                                         \
    KERNEL __launch_bounds__(256, 2) void router_rows_##TYPE(const A* logits, const int* sequence, const u8* padding,         \
                                                          int* counts_se, double* of_rows, i64 t, i64 e, i64 k,            \
                                                          i64 function, i64 warp_bytes) {                                  \
        rows(logits, sequence, padding, counts_se, of_rows, t, e, k, function, warp_bytes);                                \
    }                                                                                                                      \
    EXPORT(router_rows_##TYPE)                                                                                             \
    KERNEL __launch_bounds__(256) void router_sums_##TYPE(const A* logits, const u8* padding, const double* of_rows,       \
                                                          const i64* chunks, double* sums, i64 chunk_count, i64 e,         \
                                                          i64 function) {                                                  \
        chunk_sums(logits, padding, of_rows, chunks, sums, chunk_count, e, function);                                      \
    }                                                                                                                      \
    EXPORT(router_sums_##TYPE)                                                                                             \
    /* Without dgate the logistic function of x, with it the gradient by the logits of a gate x. */                        \
    KERNEL __launch_bounds__(256) void router_gate_##TYPE(const A* dgate, const A* x, A* out, i64 n) {                     \
        i64 stride = i64(gridDim.x) * blockDim.x;                                                                          \
        for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < n; i += stride)                                       \
            out[i] = dgate ? dgate[i] * x[i] * (A(1) - x[i]) : sigmoid_of(x[i]);                                           \
    }                                                                                                                      \
    EXPORT(router_gate_##TYPE)
ROUTER(float, f32)
ROUTER(double, f64)
