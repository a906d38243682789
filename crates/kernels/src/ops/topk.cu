// The k largest scores of every row [t, e], in falling order, ties to the lower index; a warp a row. Up to 512
// candidates stay in registers between the k searches, longer rows are read again from the nearest cache. A search asks
// for the first that comes behind the last winner, so nothing is marked. Bytes moved: t e s read, t k (4 + s) written
// (s bytes an element); the floor is that over the memory's bandwidth.

template <class A, int ITEMS> struct Held {
    A v[ITEMS];
    DEVICE_MEMBER A operator()(const A*, int i, i64) const { return v[i]; }
};
template <class A> struct Held<A, 0> {
    DEVICE_MEMBER A operator()(const A* row, int, i64 c) const { return row[c]; }
};

// The first of this lane's candidates behind `last`.
template <class A, int ITEMS> DEVICE Ranked<A> next_of_lane(const Held<A, ITEMS>& held, const A* row, i64 candidates, int lane, Ranked<A> last) {
    Ranked<A> best = behind_all<A>();
    int items = ITEMS ? ITEMS : int(ceil_div(candidates, 32));
#pragma unroll
    for (int i = 0; i < (ITEMS ? ITEMS : items); i++) {
        i64 c = lane + 32 * i64(i);
        if (c >= candidates) continue;
        Ranked<A> one;
        one.value = held(row, i, c);
        one.index = int(c);
        if (precedes(last, one) && precedes(one, best)) best = one;
    }
    return best;
}

template <class A, int ITEMS>
DEVICE void topk(const A* scores, i64 tokens, i64 candidates, i64 k, int* ids, A* values, int* nan_row) {
    int lane = int(threadIdx.x) & 31;
    i64 warps = i64(gridDim.x) * (blockDim.x >> 5);
    for (i64 t = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5); t < tokens; t += warps) {
        const A* row = scores + t * candidates;
        Held<A, ITEMS> held;
        bool nan = false;
        if constexpr (ITEMS > 0) {
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                i64 c = lane + 32 * i64(i);
                held.v[i] = c < candidates ? row[c] : A(0);
                nan |= held.v[i] != held.v[i];
            }
        } else {
            for (i64 c = lane; c < candidates; c += 32) nan |= row[c] != row[c];
        }
        // A NaN has no rank: the caller is told the first such row.
        if (__any_sync(WHOLE_WARP, nan)) {
            if (lane == 0) atomicMin(nan_row, int(t));
            continue;
        }
        Ranked<A> last = before_all<A>(), own = last;
        for (i64 j = 0; j < k; j++) {
            last = warp_first(next_of_lane<A, ITEMS>(held, row, candidates, lane, last));
            // A lane keeps one winner of 32, so that they are written together.
            if (lane == int(j & 31)) own = last;
            if (((j & 31) == 31 || j == k - 1) && lane <= int(j & 31)) {
                i64 place = t * k + (j & ~i64(31)) + lane;
                ids[place] = own.index;
                values[place] = own.value;
            }
        }
    }
}

#define TOPK(ITEMS, A, TYPE)                                                                                             \
    KERNEL __launch_bounds__(256) void topk_##ITEMS##_##TYPE(const A* scores, i64 tokens, i64 candidates, i64 k, int* ids, \
                                                             A* values, int* nan_row) {                                 \
        topk<A, ITEMS>(scores, tokens, candidates, k, ids, values, nan_row);                                            \
    }                                                                                                                   \
    EXPORT(topk_##ITEMS##_##TYPE)

TOPK(4, float, f32)
TOPK(16, float, f32)
TOPK(0, float, f32)
TOPK(4, double, f64)
TOPK(16, double, f64)
TOPK(0, double, f64)
