// Which slots keep their expert under a capacity; a block an expert and scope. The block lists the slots that ask for its
// expert, by rising token, with their keys, and where there are more than the capacity each one's preferred ones are
// counted. Bytes moved: e t k 4 read (from the second-level cache after the first of the e readings) and 8 m written and
// read, for the m slots that ask; then m^2 / 2 comparisons where m is beyond the capacity. The floor is t k 8 bytes over
// the memory's bandwidth, or the comparisons of the fullest expert on one multiprocessor, whichever is longer.

enum Preference { WEIGHT = 0, POSITION = 1, CHOICE = 2 };

// Whether entry j stands before entry i: a larger key, or as large a one and earlier; what is no number comes last.
DEVICE bool is_ahead(float key_j, i64 j, float key_i, i64 i) {
    bool nan_j = key_j != key_j, nan_i = key_i != key_i;
    if (nan_j || nan_i) return nan_j == nan_i ? j < i : nan_i;
    return key_j > key_i || (key_j == key_i && j < i);
}

template <class A>
DEVICE void keep(const int* ids, const A* weights, int* kept, const i64* boundaries, const i64* capacities, int* lists,
                 float* all_keys, i64 scopes, i64 experts, i64 tokens, i64 k, i64 preference) {
    SHARED(int, found_of_warps, 32);
    int warp = int(threadIdx.x) >> 5, lane = int(threadIdx.x) & 31, warps = int(blockDim.x) >> 5;
    for (i64 b = blockIdx.x; b < scopes * experts; b += gridDim.x) {
        i64 scope = b / experts, expert = b % experts;
        i64 first = boundaries[scope], end = boundaries[scope + 1], capacity = capacities[scope];
        int* list = lists + expert * tokens + first;
        float* keys = all_keys + expert * tokens + first;
        i64 count = 0;
        for (i64 base = first; base < end; base += blockDim.x) {
            i64 t = base + threadIdx.x, slot = -1;
            if (t < end)
                for (i64 j = 0; j < k; j++)
                    if (ids[t * k + j] == expert) slot = t * k + j;
            u32 found = __ballot_sync(WHOLE_WARP, slot >= 0);
            if (lane == 0) found_of_warps[warp] = __popc(found);
            __syncthreads();
            i64 place = count + __popc(found & ((1u << lane) - 1));
            for (int w = 0; w < warps; w++) {
                if (w < warp) place += found_of_warps[w];
                count += found_of_warps[w];
            }
            if (slot >= 0) {
                list[place] = int(slot);
                keys[place] = preference == WEIGHT ? float(weights[slot]) : preference == CHOICE ? -float(slot % k) : 0.0f;
            }
            // Also makes the list known to the whole block.
            __syncthreads();
        }
        if (count <= capacity) continue;
        for (i64 i = threadIdx.x; i < count; i += blockDim.x) {
            i64 ahead = 0;
            float key = keys[i];
            for (i64 j = 0; j < count && ahead < capacity; j++) ahead += is_ahead(keys[j], j, key, i);
            if (ahead >= capacity) kept[list[i]] = -1;
        }
        __syncthreads();
    }
}

#define KEEP(A, TYPE)                                                                                                   \
    KERNEL __launch_bounds__(256) void capacity_keep_##TYPE(const int* ids, const A* weights, int* kept,                \
                                                            const i64* boundaries, const i64* capacities, int* lists,   \
                                                            float* keys, i64 scopes, i64 experts, i64 tokens, i64 k,    \
                                                            i64 preference) {                                           \
        keep(ids, weights, kept, boundaries, capacities, lists, keys, scopes, experts, tokens, k, preference);          \
    }                                                                                                                   \
    EXPORT(capacity_keep_##TYPE)
KEEP(float, f32)
KEEP(double, f64)
