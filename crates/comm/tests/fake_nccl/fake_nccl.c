/* A stand-in for libnccl.so.2 that tests load: it moves bytes between the emulated GPUs of threads of one process.
 *
 * What it keeps of the real one: communicators are made and split asynchronously (calls return ncclInProgress, and some
 * questions later they are through); operations of a group are queued on a stream as one and move on independently;
 * nothing moves before every party's stream has come to the operation; one communicator runs its operations in the
 * order of the calls; giving up ends what waits. What it checks beyond: every party of a collective calls the same one.
 * The first calls between two parties are only queued when both have made them, as connections are made then.
 * What it leaves out: everything about speed, topology, networks. Sums are those of ranks as threads: in rank order, in
 * the accumulator, rounded once.
 *
 * A stream is an `Enqueue` of plica's emulator. Work is a function that returns 0 once it is done and is called again
 * until then. No lock is held while another device's stream is run. */

#include "parties.h"

/* ---- communicators ---- */

/* Under the lock. */
static Comm* join(const char* key, int rank, int size) {
    Shared* shared = all_shared;
    while (shared && strcmp(shared->key, key) != 0) shared = shared->next;
    if (!shared) {
        shared = calloc(1, sizeof *shared);
        snprintf(shared->key, sizeof shared->key, "%s", key);
        shared->size = size;
        shared->sends = calloc((size_t)(size * size), sizeof *shared->sends);
        shared->receives = calloc((size_t)(size * size), sizeof *shared->receives);
        shared->has_sent = calloc((size_t)(size * size), 1);
        shared->has_received = calloc((size_t)(size * size), 1);
        shared->next = all_shared;
        all_shared = shared;
    }
    shared->joined++;
    Comm* comm = calloc(1, sizeof *comm);
    comm->shared = shared;
    comm->rank = rank;
    comm->is_live = 1;
    comm->questions = QUESTIONS;
    return comm;
}

EXPORT int ncclGetVersion(int* version) { *version = FAKE_VERSION; return SUCCESS; }

EXPORT int ncclGetUniqueId(Id* id) {
    pthread_mutex_lock(&mutex);
    int code = called("ncclGetUniqueId", NULL);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "id %llu", (unsigned long long)++ids);
    pthread_mutex_unlock(&mutex);
    return code;
}

EXPORT const char* ncclGetErrorString(int code) {
    switch (code) {
        case SUCCESS: return "no error";
        case INTERNAL: return "internal error";
        case BAD_ARGUMENT: return "invalid argument";
        case BAD_USE: return "invalid usage";
        case 6: return "remote process exited or there was a network error";
        case IN_PROGRESS: return "in progress";
        default: return "unhandled error";
    }
}

EXPORT const char* ncclGetLastError(Comm* comm) { (void)comm; return last_error; }

EXPORT int ncclCommInitRankConfig(Comm** place, int size, Id id, int rank, Config* config) {
    int is_right = config->magic == 0xcafebeef && config->size >= 44 && config->blocking == 0 &&
                   config->version >= 21400 && config->cga == INT32_MIN && !config->net;
    pthread_mutex_lock(&mutex);
    Comm probe = {.rank = rank};
    int code = called("ncclCommInitRankConfig", &probe);
    if (code == SUCCESS && (!is_right || rank < 0 || rank >= size)) code = complain(BAD_ARGUMENT, "a bad config");
    if (code == SUCCESS) *place = join(id.bytes, rank, size);
    pthread_mutex_unlock(&mutex);
    return code == SUCCESS ? IN_PROGRESS : code;
}

/* Colors and keys of a split, by the parent's ranks. */
typedef struct Split { char key[160]; int size, come; int *colors, *keys; struct Split* next; } Split;
static Split* all_splits;
typedef struct Child { Comm* parent; Split* split; Comm** place; struct Child* next; } Child;
static Child* children;

EXPORT int ncclCommSplit(Comm* comm, int color, int key, Comm** place, Config* config) {
    (void)config;
    pthread_mutex_lock(&mutex);
    int code = called("ncclCommSplit", comm);
    if (code == SUCCESS) {
        char name[160];
        snprintf(name, sizeof name, "%.100s split %llu", comm->shared->key, (unsigned long long)comm->splits++);
        Split* split = all_splits;
        while (split && strcmp(split->key, name) != 0) split = split->next;
        if (!split) {
            split = calloc(1, sizeof *split);
            snprintf(split->key, sizeof split->key, "%s", name);
            split->size = comm->shared->size;
            split->colors = calloc((size_t)split->size, sizeof(int));
            split->keys = calloc((size_t)split->size, sizeof(int));
            split->next = all_splits;
            all_splits = split;
        }
        split->colors[comm->rank] = color;
        split->keys[comm->rank] = key;
        split->come++;
        Child* child = calloc(1, sizeof *child);
        *child = (Child){comm, split, place, children};
        children = child;
        comm->pending++;
    }
    pthread_mutex_unlock(&mutex);
    return code == SUCCESS ? IN_PROGRESS : code;
}

/* Under the lock: makes the children of a split that all have called. */
static void make_children(Comm* parent) {
    for (Child** at = &children; *at;) {
        Child* child = *at;
        Split* split = child->split;
        if (child->parent != parent || split->come < split->size) { at = &child->next; continue; }
        int own = split->colors[parent->rank], size = 0, rank = 0;
        for (int r = 0; r < split->size; r++) {
            if (split->colors[r] != own) continue;
            size++;
            rank += split->keys[r] < split->keys[parent->rank] ||
                    (split->keys[r] == split->keys[parent->rank] && r < parent->rank);
        }
        char key[160];
        snprintf(key, sizeof key, "%.140s color %d", split->key, own);
        if (own >= 0) __atomic_store_n(child->place, join(key, rank, size), __ATOMIC_RELEASE);
        parent->pending--;
        *at = child->next;
        free(child);
    }
}

/* Under the lock: whether those that a communicator has called have called it. */
static int have_met(const Comm* comm) {
    const Shared* s = comm->shared;
    int n = s->size, own = comm->rank;
    if (comm->collectives > 0 && s->first_called < n) return 0;
    for (int r = 0; r < n; r++) {
        if (s->has_sent[own * n + r] && !s->has_received[own * n + r]) return 0;
        if (s->has_received[r * n + own] && !s->has_sent[r * n + own]) return 0;
    }
    return 1;
}

/* Puts what a communicator holds on its streams, if its parties have met; not under the lock. */
static int release(Comm* comm) {
    pthread_mutex_lock(&mutex);
    Item* held = have_met(comm) ? comm->held : NULL;
    if (held) comm->held = NULL;
    pthread_mutex_unlock(&mutex);
    for (; held; held = held->next) {
        Enqueue* stream = held->parts[0]->stream;
        if (stream->enqueue(stream, run, held) != 0) return complain(INTERNAL, "a stream failed");
    }
    return SUCCESS;
}

EXPORT int ncclCommGetAsyncError(Comm* comm, int* state) {
    int code = release(comm);
    pthread_mutex_lock(&mutex);
    make_children(comm);
    *state = code;
    if (comm->shared->joined < comm->shared->size || comm->pending > 0) *state = IN_PROGRESS;
    else if (comm->questions > 0) { comm->questions--; *state = IN_PROGRESS; }
    else if (comm->held) *state = IN_PROGRESS;
    if (comm->error) *state = comm->error;
    if (async_rank == comm->rank && comm->collectives > 0) *state = complain(async_code, "the network was made to fail");
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

EXPORT int ncclCommCount(Comm* comm, int* count) { *count = comm->shared->size; return SUCCESS; }
EXPORT int ncclCommUserRank(Comm* comm, int* rank) { *rank = comm->rank; return SUCCESS; }

EXPORT int ncclCommFinalize(Comm* comm) {
    pthread_mutex_lock(&mutex);
    int code = called("ncclCommFinalize", comm);
    pthread_mutex_unlock(&mutex);
    return code;
}

/* Communicators are not freed: their work may still lie on streams. */
EXPORT int ncclCommDestroy(Comm* comm) {
    pthread_mutex_lock(&mutex);
    int code = called("ncclCommDestroy", comm);
    comm->is_live = 0;
    pthread_mutex_unlock(&mutex);
    return code;
}

EXPORT int ncclCommAbort(Comm* comm) {
    pthread_mutex_lock(&mutex);
    called("ncclCommAbort", comm);
    comm->is_live = 0;
    comm->shared->is_given_up = 1;
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

/* ---- calls and groups ---- */

static void append(Part** at, Part* part) {
    while (*at) at = &(*at)->next;
    *at = part;
}

/* Under the lock. */
static void enter(Comm* comm, Part* part) {
    Shared* s = comm->shared;
    int n = s->size, out = comm->rank * n + part->peer, in = part->peer * n + comm->rank;
    if (part->kind == SEND) {
        append(&s->sends[out], part);
        s->has_sent[out] = 1;
    } else if (part->kind == RECEIVE) {
        append(&s->receives[in], part);
        s->has_received[in] = 1;
    } else {
        s->first_called += comm->collectives == 0;
        part->meeting = meeting(s, comm->collectives++);
        part->meeting->parts[comm->rank] = part;
    }
}

EXPORT int ncclGroupStart(void) { depth++; return SUCCESS; }

EXPORT int ncclGroupEnd(void) {
    if (depth == 0) return BAD_USE;
    if (--depth > 0) return SUCCESS;
    int count = group_count, code = group_code, is_held = 0;
    group_count = group_code = 0;
    if (code != SUCCESS) return code;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < count; i++) enter(group[i].comm, group[i].part);
    /* One piece of work for each communicator and stream of the group. */
    for (int i = 0; i < count; i++) {
        if (!group[i].part) continue;
        Item* item = calloc(1, sizeof *item);
        item->comm = group[i].comm;
        item->parts = calloc((size_t)count, sizeof *item->parts);
        Enqueue* stream = group[i].part->stream;
        for (int k = i; k < count; k++) {
            if (group[k].comm != item->comm || !group[k].part || group[k].part->stream != stream) continue;
            item->parts[item->count++] = group[k].part;
            group[k].part = NULL;
        }
        Item** at = &item->comm->held;
        while (*at) at = &(*at)->next;
        *at = item;
    }
    pthread_mutex_unlock(&mutex);
    for (int i = 0; i < count; i++) {
        code = release(group[i].comm);
        if (code != SUCCESS) return code;
        pthread_mutex_lock(&mutex);
        is_held |= group[i].comm->held != NULL;
        pthread_mutex_unlock(&mutex);
    }
    return is_held ? IN_PROGRESS : SUCCESS;
}

static int add(const char* name, Comm* comm, Part part) {
    pthread_mutex_lock(&mutex);
    int code = called(name, comm);
    if (code == SUCCESS && !comm->is_live) code = complain(BAD_ARGUMENT, "%s on a dead communicator", name);
    if (code == SUCCESS && (comm->shared->joined < comm->shared->size || comm->questions > 0))
        code = complain(BAD_USE, "%s on a communicator that is not ready", name);
    int is_message = part.kind == SEND || part.kind == RECEIVE;
    int peer = is_message ? part.peer : part.root;
    if (code == SUCCESS && (peer < 0 || peer >= comm->shared->size || size_of(part.type) == 0 || part.count == 0))
        code = complain(BAD_ARGUMENT, "%s with a bad peer, type or count", name);
    pthread_mutex_unlock(&mutex);
    if (code != SUCCESS) {
        if (depth > 0) group_code = code;
        return code;
    }
    depth++;
    Part* kept = malloc(sizeof *kept);
    *kept = part;
    group[group_count].comm = comm;
    group[group_count++].part = kept;
    return ncclGroupEnd();
}

EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, Comm* comm, Enqueue* stream) {
    return add("ncclAllReduce", comm, (Part){.kind = ALL_REDUCE, .type = type, .op = op, .from = from, .to = to, .count = count, .stream = stream});
}
EXPORT int ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm, Enqueue* stream) {
    return add("ncclAllGather", comm, (Part){.kind = ALL_GATHER, .type = type, .from = from, .to = to, .count = count, .stream = stream});
}
EXPORT int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, Comm* comm, Enqueue* stream) {
    return add("ncclReduceScatter", comm, (Part){.kind = REDUCE_SCATTER, .type = type, .op = op, .from = from, .to = to, .count = count, .stream = stream});
}
EXPORT int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, Comm* comm, Enqueue* stream) {
    return add("ncclReduce", comm, (Part){.kind = REDUCE, .root = root, .type = type, .op = op, .from = from, .to = to, .count = count, .stream = stream});
}
EXPORT int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Comm* comm, Enqueue* stream) {
    return add("ncclBroadcast", comm, (Part){.kind = BROADCAST, .root = root, .type = type, .from = from, .to = to, .count = count, .stream = stream});
}
EXPORT int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, Enqueue* stream) {
    return add("ncclSend", comm, (Part){.kind = SEND, .peer = peer, .type = type, .from = from, .count = count, .stream = stream});
}
#ifndef FAKE_WITHOUT_RECEIVE
EXPORT int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, Enqueue* stream) {
    return add("ncclRecv", comm, (Part){.kind = RECEIVE, .peer = peer, .type = type, .to = to, .count = count, .stream = stream});
}
#endif
