/* What the parties of the fake library's operations bring, what happens when their streams have come to an operation, and
 * what tests inject and count. See fake_nccl.c. */

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION 23007
#endif
#define QUESTIONS 3 /* answered with "in progress" before a communicator is there */
#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INTERNAL = 3, BAD_ARGUMENT = 4, BAD_USE = 5, IN_PROGRESS = 7 };
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, REDUCE, BROADCAST, SEND, RECEIVE };

typedef struct Enqueue Enqueue;
struct Enqueue {
    int (*enqueue)(Enqueue*, int (*)(void*), void*);
    void (*advance)(Enqueue*);
};

typedef struct { char bytes[128]; } Id;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga, ctas_min, ctas_max;
    const char* net;
    int share, traffic;
} Config;

/* What one party brings to an operation. */
typedef struct Part {
    int kind, root, peer, type, op;
    const char* from;
    char* to;
    size_t count;
    Enqueue* stream;
    int is_active; /* its stream has come to it */
    int is_done;
    struct Meeting* meeting;
    struct Part* next;
} Part;

/* What all parties bring to the n-th collective. */
typedef struct Meeting {
    uint64_t number;
    Part** parts; /* by rank */
    struct Meeting* next;
} Meeting;

/* What the members of a communicator share. */
typedef struct Shared {
    char key[160];
    int size, joined, is_given_up;
    Meeting* meetings;
    Part** sends; /* first of each (source, target) */
    Part** receives;
    int first_called; /* ranks that have called a collective */
    char *has_sent, *has_received; /* pairs of which one side has called */
    struct Shared* next;
} Shared;

typedef struct Comm {
    Shared* shared;
    int rank, is_live, questions, pending, error;
    uint64_t collectives, splits;
    struct Item* held; /* calls whose parties have not met yet */
} Comm;

/* What one call, or one group of calls, puts on a stream. */
typedef struct Item {
    Comm* comm;
    int count;
    Part** parts;
    struct Item* next;
} Item;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Shared* all_shared;
static uint64_t ids;
static char last_error[256];

/* What tests set and read: number of calls by name, a call that fails, communicators that fail later. */
typedef struct { char name[32]; uint64_t count; } Count;
static Count counts[64];
static char failing_name[32];
static int failing_rank = -1, failing_code;
static uint64_t failing_after;
static int async_rank = -1, async_code;

static __thread int depth;
static __thread struct { Comm* comm; Part* part; } group[4096];
static __thread int group_count, group_code;

static int complain(int code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return code;
}

/* Under the lock: counts a call; the code with which it has to fail, if it has to. */
static int called(const char* name, const Comm* comm) {
    Count* at = counts;
    while (at->count > 0 && strcmp(at->name, name) != 0) at++;
    snprintf(at->name, sizeof at->name, "%s", name);
    at->count++;
    int is_it = strcmp(name, failing_name) == 0 && (failing_rank < 0 || (comm && comm->rank == failing_rank));
    if (!is_it) return SUCCESS;
    if (failing_after > 0) { failing_after--; return SUCCESS; }
    return complain(failing_code, "%s was made to fail", name);
}

EXPORT void fake_fail_call(const char* name, int rank, uint64_t after, int code) {
    pthread_mutex_lock(&mutex);
    snprintf(failing_name, sizeof failing_name, "%s", name);
    failing_rank = rank; failing_after = after; failing_code = code;
    pthread_mutex_unlock(&mutex);
}

EXPORT void fake_fail_later(int rank, int code) {
    pthread_mutex_lock(&mutex);
    async_rank = rank; async_code = code;
    pthread_mutex_unlock(&mutex);
}

EXPORT void fake_reset(void) {
    pthread_mutex_lock(&mutex);
    memset(counts, 0, sizeof counts);
    failing_name[0] = 0; failing_rank = async_rank = -1;
    pthread_mutex_unlock(&mutex);
}

EXPORT uint64_t fake_calls(const char* name) {
    pthread_mutex_lock(&mutex);
    uint64_t found = 0;
    for (Count* at = counts; at->count > 0; at++) if (strcmp(at->name, name) == 0) found = at->count;
    pthread_mutex_unlock(&mutex);
    return found;
}

/* ---- element types ---- */

static size_t size_of(int type) {
    switch (type) {
        case 1: return 1;
        case 2: case 7: return 4;
        case 4: case 8: return 8;
        case 9: return 2;
        default: return 0;
    }
}

static float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define REDUCE_AS(stored, wide, load, store) \
    for (size_t i = 0; i < count; i++) { \
        wide sum = load(((const stored*)from[0])[i]); \
        for (int r = 1; r < n; r++) { \
            wide x = load(((const stored*)from[r])[i]); \
            sum = op == 0 ? (wide)(sum + x) : (op == 2 ? x > sum : x < sum) ? x : sum; \
        } \
        ((stored*)to)[i] = store(sum); \
    }
#define SAME(x) (x)
#define TO_BYTE(x) ((uint8_t)(x))

/* n inputs into one output, which is none of them. */
static void reduce(int type, int op, int n, const char** from, char* to, size_t count) {
    switch (type) {
        case 1: REDUCE_AS(uint8_t, uint32_t, SAME, TO_BYTE) break;
        case 2: REDUCE_AS(int32_t, int32_t, SAME, SAME) break;
        case 4: REDUCE_AS(int64_t, int64_t, SAME, SAME) break;
        case 7: REDUCE_AS(float, float, SAME, SAME) break;
        case 8: REDUCE_AS(double, double, SAME, SAME) break;
        case 9: REDUCE_AS(uint16_t, float, widen, narrow) break;
    }
}

/* ---- what happens when streams have come to an operation; all under the lock ---- */

static Meeting* meeting(Shared* shared, uint64_t number) {
    for (Meeting* m = shared->meetings; m; m = m->next) if (m->number == number) return m;
    Meeting* m = calloc(1, sizeof *m);
    m->number = number;
    m->parts = calloc((size_t)shared->size, sizeof *m->parts);
    m->next = shared->meetings;
    shared->meetings = m;
    return m;
}

/* The collective that all have come to. */
static int perform(Shared* shared, Meeting* m) {
    int n = shared->size;
    Part* first = m->parts[0];
    const char** from = malloc((size_t)n * sizeof *from);
    for (int r = 0; r < n; r++) {
        Part* p = m->parts[r];
        int same = p->kind == first->kind && p->count == first->count && p->type == first->type &&
                   p->op == first->op && p->root == first->root;
        if (!same) { free(from); return complain(BAD_USE, "ranks 0 and %d call different collectives", r); }
        from[r] = p->from;
    }
    size_t bytes = first->count * size_of(first->type);
    for (int r = 0; r < n; r++) {
        Part* p = m->parts[r];
        switch (p->kind) {
            case ALL_REDUCE: reduce(p->type, p->op, n, from, p->to, p->count); break;
            case ALL_GATHER:
                for (int s = 0; s < n; s++) memmove(p->to + (size_t)s * bytes, from[s], bytes);
                break;
            case REDUCE_SCATTER: {
                const char** at = malloc((size_t)n * sizeof *at);
                for (int s = 0; s < n; s++) at[s] = from[s] + (size_t)r * bytes;
                reduce(p->type, p->op, n, at, p->to, p->count);
                free(at);
                break;
            }
            case REDUCE: if (r == p->root) reduce(p->type, p->op, n, from, p->to, p->count); break;
            case BROADCAST: if (p->to != from[p->root]) memmove(p->to, from[p->root], bytes); break;
        }
        p->is_done = 1;
    }
    free(from);
    return SUCCESS;
}

static int match_messages(Shared* shared, int source, int target) {
    Part** sends = &shared->sends[source * shared->size + target];
    Part** receives = &shared->receives[source * shared->size + target];
    while (*sends && *receives && (*sends)->is_active && (*receives)->is_active) {
        Part *s = *sends, *r = *receives;
        if (s->count != r->count || s->type != r->type)
            return complain(BAD_USE, "rank %d sends %zu elements, rank %d expects %zu", source, s->count, target, r->count);
        memmove(r->to, s->from, s->count * size_of(s->type));
        *sends = s->next;
        *receives = r->next;
        s->is_done = r->is_done = 1;
    }
    return SUCCESS;
}

/* Under the lock: how many parts of an item are not done. */
static int left_of(const Item* item) {
    int left = 0;
    for (int i = 0; i < item->count; i++) left += !item->parts[i]->is_done;
    return item->comm->shared->is_given_up || !item->comm->is_live ? 0 : left;
}

/* Under the lock: streams of those that have called an operation of an item, but have not come to it. */
static int late(const Item* item, Enqueue** others, int most) {
    Shared* s = item->comm->shared;
    int n = s->size, own = item->comm->rank, count = 0;
    for (int i = 0; i < item->count; i++) {
        Part* part = item->parts[i];
        if (part->is_done) continue;
        if (part->meeting) {
            for (int r = 0; r < n && count < most; r++) {
                Part* other = part->meeting->parts[r];
                if (other && !other->is_active) others[count++] = other->stream;
            }
        } else if (count < most) {
            Part* other = part->kind == SEND ? s->receives[own * n + part->peer] : s->sends[part->peer * n + own];
            if (other && !other->is_active) others[count++] = other->stream;
        }
    }
    return count;
}

/* Under the lock: a stream has come to a part. */
static int come_to(Comm* comm, Part* part) {
    Shared* shared = comm->shared;
    part->is_active = 1;
    if (part->kind == SEND) return match_messages(shared, comm->rank, part->peer);
    if (part->kind == RECEIVE) return match_messages(shared, part->peer, comm->rank);
    int active = 0;
    for (int r = 0; r < shared->size; r++) {
        Part* other = part->meeting->parts[r];
        active += other && other->is_active;
    }
    return active == shared->size ? perform(shared, part->meeting) : SUCCESS;
}

/* Work on a stream: 0 once all parts are done. */
static int run(void* argument) {
    Item* item = argument;
    Comm* comm = item->comm;
    Enqueue* others[256];
    pthread_mutex_lock(&mutex);
    int left = left_of(item);
    for (int i = 0; i < item->count && left > 0; i++) {
        if (item->parts[i]->is_done) continue;
        int code = come_to(comm, item->parts[i]);
        if (code != SUCCESS) comm->error = code;
    }
    int count = left > 0 ? late(item, others, 256) : 0;
    pthread_mutex_unlock(&mutex);
    for (int i = 0; i < count; i++) others[i]->advance(others[i]);
    pthread_mutex_lock(&mutex);
    left = left_of(item);
    pthread_mutex_unlock(&mutex);
    return left > 0;
}
