// Operations on symmetric memory of devices: csrc/symm/composites.cpp as kernels, one source for CUDA and
// HIP, compiled at run time. What differs is in device.h; reductions.h is a part of this file.
//
// An operation is a sequence of kernels on a stream: one block that meets the other ranks (and checks all
// their splits), many blocks that move data, and one block that waits until all ranks have done so. At a
// meeting each rank announces its call in its own control block, writes the number of the meeting to all
// others, waits for theirs, and compares their announcements with its own. The number is kept on the device,
// so graphs can be replayed. Only kernels of one block wait, so ranks may share a device.
//
// Every wait ends: by the words of the others, at a time limit, or by the `abort` word of the host. The first
// failure is written into the status record of the host, and the data kernels after it do nothing.
//
// A thread block may have any size; nothing depends on the size of a warp.
#include "device.h"

// The arguments of a kernel. The launcher reads the names here: each is one integer, addresses too.
struct Args {
    Int rank;
    Int world;
    Int distances;  // Int[world]: distances of the ranks' memory from the own
    Int control;    // the own control block, of control_words, at the same place on all ranks
    Int status;     // Word[8 + 4 * world] of host memory
    Int abort;      // Word of host memory: nonzero ends all waits
    Int limit_ns;   // time limit of a wait
    Int called;     // op | dtype << 32 | reduction << 40
    Int signature;
    Int root;
    Int relaxed;  // the operation ends without a barrier, unless it was refused
    Int in;
    Int in_rows;
    Int out;
    Int out_rows;
    Int row_bytes;  // or bytes of a block
    Int splits;     // symmetric; 0: those of the announcements
    Int said_splits;  // Int[world] to announce, or 0
    Int results;      // Int[2 * columns]: rows and offsets in `out`
    Int sources;      // Int[columns]: offsets in the others' `in`
    Int scratch;
    Int experts;
    Int align;  // alignment of the blocks of experts, in rows; 0: dense
    Int by_rank;  // whether results are rank-major
    Int red;
    Int spread;  // whether the result goes to all ranks
    Int rows;
    Int columns;
    Int in_row_step;
    Int in_column_step;
    Int out_row_step;
    Int out_column_step;
    Int peer;
    Int word;
    Int value;
    Int expected;
    Int compare;
    Int counter;  // count of the waits for a word that only grows, or 0
};

// Words of the control block. Behind them is one word for each rank, which that rank writes; then two places
// for announcements, used in turn: a rank that is at a meeting for the second time has seen all others at the
// meeting between, after they had read.
enum { kEpoch = 0, kBroken = 1, kVerdict = 2, kArrived = 8 };
enum { kMeeting = 0, kSignature = 1, kCalled = 2, kRoot = 3, kHead = 8 };
// Words of the status record; four for each rank follow.
enum { kKind = 0, kOperation = 1, kWho = 2, kRows = 3, kEach = 8 };
enum Verdict { kGood = 0, kFull = 1, kSplits = 2, kMismatch = 3, kLate = 4, kAborted = 5 };
enum { kSum = 1, kProduct = 2, kMin = 3, kMax = 4 };

struct alignas(16) Wide {
    Word a, b;
};

// --- where things are --------------------------------------------------------------------------------------

#define EACH(i, n) for (Int i = threadIdx.x; i < (n); i += blockDim.x)

template <class T>
__device__ T* at(Int address) {
    return reinterpret_cast<T*>(address);
}
template <class T>
__device__ T* theirs(const Args& a, Int own, Int rank) {
    return at<T>(own + at<Int>(a.distances)[rank]);
}
__device__ Word* control(const Args& a) { return at<Word>(a.control); }
__device__ Word* said(const Args& a, Word epoch) {
    return control(a) + kArrived + a.world + (epoch % 2) * Word(kHead + a.world);
}

// --- waiting -----------------------------------------------------------------------------------------------

__device__ bool is_so(Word word, Int compare, Word value) {
    switch (compare) {
        case 0:
            return word == value;
        case 1:
            return word != value;
        case 2:
            return word > value;
        case 3:
            return word >= value;
        case 4:
            return word < value;
        default:
            return word <= value;
    }
}

__device__ Verdict wait_for(const Args& a, const Word* word, Int compare, Word value) {
    Word start = now_ns();
    for (unsigned n = 1;; ++n) {
        if (is_so(load_acquire(word), compare, value)) return kGood;
        if (n % 32 == 0) {  // access to host memory is slow
            if (load_acquire(at<Word>(a.abort)) != 0) return kAborted;
            if (now_ns() - start > Word(a.limit_ns)) return kLate;
        }
        pause_a_little();
    }
}

// Whether a failure is to be recorded: the first one is kept, but one after which nothing runs any more takes the
// place of one that the program may not have read.
__device__ bool is_news(const Args& a, Verdict kind) {
    Word* status = at<Word>(a.status);
    Word known = load_acquire(status + kKind);
    if (known != 0 && kind >= kLate && known < kLate) store_release(status + kKind, known = 0);
    return known == 0;
}

// Reports a failure; called by one thread, after it has written the other words if the failure is news.
__device__ void tell(const Args& a, Verdict kind, Int who, Int rows) {
    Word* status = at<Word>(a.status);
    if (is_news(a, kind)) {
        status[kOperation] = Word(a.called);
        status[kWho] = Word(who);
        status[kRows] = Word(rows);
        store_release(status + kKind, Word(kind));
    }
    if (kind == kLate || kind == kAborted) control(a)[kBroken] = 1;
    control(a)[kVerdict] = kind;
}

// Meets all ranks; called by all threads of the one block. Returns false if a rank did not come.
__device__ bool all_arrive(const Args& a) {
    __shared__ Word epoch;
    __shared__ int worst;
    Word* own = control(a);
    if (threadIdx.x == 0) {
        epoch = own[kEpoch] + 1;
        own[kEpoch] = epoch;
        worst = kGood;
    }
    __syncthreads();
    __threadfence_system();
    EACH(p, a.world) store_release(theirs<Word>(a, a.control, p) + kArrived + a.rank, epoch);
    __syncthreads();
    EACH(p, a.world) {
        Verdict came = wait_for(a, own + kArrived + p, 3, epoch);
        if (came != kGood) worst = came;
    }
    __syncthreads();
    if (worst != kGood) {
        Word* status = at<Word>(a.status);
        if (threadIdx.x == 0 && is_news(a, Verdict(worst))) {
            for (Int p = 0; p < a.world; ++p)
                status[kEach + 4 * p] = load_acquire(own + kArrived + p) >= epoch;
        }
        __threadfence_system();
        if (threadIdx.x == 0) tell(a, Verdict(worst), -1, 0);
    }
    return worst == kGood;
}

// Meets all ranks and compares their calls. Returns false if the operation must not run.
__device__ bool meet(const Args& a) {
    __shared__ int differs;
    Word* own = control(a);
    bool broken = own[kBroken] != 0;
    Word epoch = own[kEpoch] + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        own[kVerdict] = broken ? Word(kAborted) : Word(kGood);
        differs = 0;
    }
    if (broken) return false;
    Word* mine = said(a, epoch);
    if (threadIdx.x == 0) {
        mine[kMeeting] = epoch;
        mine[kSignature] = Word(a.signature);
        mine[kCalled] = Word(a.called);
        mine[kRoot] = Word(a.root);
    }
    if (a.said_splits) EACH(p, a.world) mine[kHead + p] = at<Word>(a.said_splits)[p];
    __syncthreads();
    if (!all_arrive(a)) return false;
    Int place = Int(mine);
    EACH(p, a.world) {
        const Word* other = theirs<Word>(a, place, p);
        if (other[kMeeting] != epoch || other[kSignature] != Word(a.signature)) differs = 1;
    }
    __syncthreads();
    if (!differs) return true;
    Word* status = at<Word>(a.status);
    if (threadIdx.x == 0 && load_acquire(status + kKind) == 0) {
        for (Int p = 0; p < a.world; ++p) {
            const Word* other = theirs<Word>(a, place, p);
            bool here = other[kMeeting] == epoch;  // else the rank is not at a meeting
            status[kEach + 4 * p] = here;
            status[kEach + 4 * p + 1] = other[kCalled];
            status[kEach + 4 * p + 2] = other[kRoot];
            status[kEach + 4 * p + 3] = other[kSignature];
        }
    }
    __threadfence_system();
    if (threadIdx.x == 0) tell(a, kMismatch, -1, 0);
    return false;
}

extern "C" __global__ void symm_meet(Args a) { meet(a); }

extern "C" __global__ void symm_leave(Args a) {
    Word verdict = control(a)[kVerdict];
    if (verdict > kSplits || (a.relaxed && verdict == kGood)) return;
    all_arrive(a);
}

// --- exchanges of rows: all ranks check all splits before a row moves --------------------------------------

__device__ void add(Int* to, Int value) { atomicAdd(reinterpret_cast<Word*>(to), Word(value)); }

// What both plans keep in `scratch`, initially zero.
struct Plan {
    Int *before, *total, *filled, *rows, *starts;
    unsigned* bad;  // the first rank whose splits are wrong
};

__device__ Plan plan_in(const Args& a) {
    Int columns = a.world * a.experts;
    Plan plan;
    plan.before = at<Int>(a.scratch);
    plan.total = plan.before + a.world;
    plan.filled = plan.total + a.world;
    plan.rows = plan.filled + columns;
    plan.starts = plan.rows + columns;
    plan.bad = reinterpret_cast<unsigned*>(plan.starts + a.experts);
    EACH(i, 2 * a.world + columns) plan.before[i] = 0;
    if (threadIdx.x == 0) *plan.bad = unsigned(a.world);
    __syncthreads();
    return plan;
}

__device__ Int padded(const Args& a, Int rows) {
    if (a.align == 0) return rows;
    Int blocks = (rows + a.align - 1) / a.align;
    return (blocks ? blocks : 1) * a.align;
}

__device__ bool refused(const Args& a, Verdict why, Int who, Int rows) {
    if (why != kGood && threadIdx.x == 0) tell(a, why, who, rows);
    return why != kGood;
}

// Returns the rank with the most rows that do not fit, or -1; `rows_of(rank)` is the end of its last row.
template <class F>
__device__ Int fullest(const Args& a, F rows_of, Int* rows) {
    Int who = -1;
    *rows = 0;
    for (Int q = 0; q < a.world; ++q) {
        Int need = rows_of(q);
        if (need > a.out_rows && need > *rows) who = q, *rows = need;
    }
    return who;
}

extern "C" __global__ void symm_meet_dispatch(Args a) {
    if (!meet(a)) return;
    Int n = a.world, experts = a.experts, columns = n * experts;
    Int splits = a.splits ? a.splits : Int(said(a, control(a)[kEpoch]) + kHead);
    Plan plan = plan_in(a);
    EACH(i, n * columns) {
        Int p = i / columns, k = i % columns, own = k - a.rank * experts;
        Int rows = theirs<Int>(a, splits, p)[k];
        if (rows < 0 || rows > a.in_rows) {
            atomicMin(plan.bad, unsigned(p));
            continue;
        }
        add(plan.total + p, rows);
        add(plan.filled + k, rows);
        if (own < 0) add(plan.before + p, rows);
        if (own >= 0 && own < experts) plan.rows[own * n + p] = rows;
    }
    __syncthreads();
    EACH(p, n) {
        if (plan.total[p] > a.in_rows) atomicMin(plan.bad, unsigned(p));
    }
    __syncthreads();
    if (*plan.bad < unsigned(n)) {
        refused(a, kSplits, *plan.bad, 0);
        return;
    }
    // The end of the last row of each rank.
    EACH(q, n) {
        Int start = 0, end = 0;
        for (Int e = 0; e < experts; ++e) {
            Int rows = plan.filled[q * experts + e];
            if (q == a.rank) plan.starts[e] = start;
            if (rows) end = start + rows;
            start += padded(a, rows);
        }
        plan.total[q] = end;
    }
    __syncthreads();
    Int rows, who = fullest(a, [&](Int q) { return plan.total[q]; }, &rows);
    if (refused(a, who < 0 ? kGood : kFull, who, rows)) return;
    EACH(e, experts) {
        Int place = plan.starts[e];
        for (Int p = 0; p < n; ++p) {
            at<Int>(a.results)[e * n + p] = plan.rows[e * n + p];
            at<Int>(a.results)[columns + e * n + p] = place;
            place += plan.rows[e * n + p];
        }
    }
    EACH(p, n) {
        Int source = plan.before[p];
        for (Int e = 0; e < experts; ++e) {
            at<Int>(a.sources)[e * n + p] = source;
            source += plan.rows[e * n + p];
        }
    }
}

extern "C" __global__ void symm_meet_combine(Args a) {
    if (!meet(a)) return;
    Int n = a.world, experts = a.experts, columns = n * experts;
    Plan plan = plan_in(a);
    EACH(i, n * columns) {
        Int p = i / columns, k = i % columns, to = p * experts + k / n;
        const Int* splits = theirs<Int>(a, a.splits, p);
        Int rows = splits[k], source = splits[columns + k];
        // The offset of an empty block may be any number.
        bool beyond = rows > a.in_rows || source < 0 || source > a.in_rows - rows;
        if (rows < 0 || (rows > 0 && beyond)) {
            atomicMin(plan.bad, unsigned(p));
            continue;
        }
        add(plan.filled + k % n, rows);
        if (k % n == a.rank) {
            plan.rows[to] = rows;
            at<Int>(a.sources)[to] = source;
            add(plan.total + p, rows);
        }
    }
    __syncthreads();
    if (*plan.bad < unsigned(n)) {
        refused(a, kSplits, *plan.bad, 0);
        return;
    }
    Int most, who = fullest(a, [&](Int q) { return plan.filled[q]; }, &most);
    if (refused(a, who < 0 ? kGood : kFull, who, most)) return;
    EACH(p, n) {
        Int place = 0;
        for (Int q = 0; q < p; ++q) place += plan.total[q];
        for (Int k = p * experts; k < (p + 1) * experts; ++k) {
            at<Int>(a.results)[k] = plan.rows[k];
            at<Int>(a.results)[columns + k] = place;
            place += plan.rows[k];
        }
    }
}

// --- moving ------------------------------------------------------------------------------------------------

template <class U>
__device__ void copy_units(char* to, const char* from, Int units, Int first, Int step) {
    U* out = reinterpret_cast<U*>(to);
    const U* in = reinterpret_cast<const U*>(from);
    Int i = first;
    for (; i + 3 * step < units; i += 4 * step) {  // four loads at a time
        U a = in[i], b = in[i + step], c = in[i + 2 * step], d = in[i + 3 * step];
        out[i] = a, out[i + step] = b, out[i + 2 * step] = c, out[i + 3 * step] = d;
    }
    for (; i < units; i += step) out[i] = in[i];
}

// Copies with `step` threads, of which this is `first`, 16 bytes at a time if both sides allow it.
__device__ void copy(char* to, const char* from, Int bytes, Int first, Int step) {
    Word skew = Word(to) ^ Word(from);
    Int unit = skew % 16 == 0 ? 16 : skew % 8 == 0 ? 8 : skew % 4 == 0 ? 4 : 1;
    Int head = (unit - Int(Word(to) % unit)) % unit;
    if (head > bytes) head = bytes;
    Int units = (bytes - head) / unit, done = head + units * unit;
    for (Int i = first; i < head; i += step) to[i] = from[i];
    if (unit == 16) copy_units<Wide>(to + head, from + head, units, first, step);
    if (unit == 8) copy_units<Word>(to + head, from + head, units, first, step);
    if (unit == 4) copy_units<unsigned>(to + head, from + head, units, first, step);
    if (unit == 1) copy_units<char>(to + head, from + head, units, first, step);
    for (Int i = done + first; i < bytes; i += step) to[i] = from[i];
}

// In a kernel of world x k blocks, k blocks serve each peer. They begin with the own rank, so that not all
// ranks read from the same one.
struct Part {
    Int peer, first, step;
};
__device__ Part part_of(const Args& a) {
    Int blocks = gridDim.x / a.world, block = blockIdx.x / a.world;
    return {(a.rank + blockIdx.x % a.world) % a.world, block * blockDim.x + threadIdx.x, blocks * blockDim.x};
}

extern "C" __global__ void symm_move_rows(Args a) {
    if (control(a)[kVerdict] != kGood) return;
    Part part = part_of(a);
    Int columns = a.world * a.experts;
    const Int *results = at<Int>(a.results), *sources = at<Int>(a.sources);
    const char* in = theirs<char>(a, a.in, part.peer);
    for (Int e = 0; e < a.experts; ++e) {
        Int k = a.by_rank ? part.peer * a.experts + e : e * a.world + part.peer;
        copy(at<char>(a.out) + results[columns + k] * a.row_bytes, in + sources[k] * a.row_bytes,
             results[k] * a.row_bytes, part.first, part.step);
    }
}

// Copies blocks of row_bytes: from the root, or the own one from each rank.
extern "C" __global__ void symm_move_blocks(Args a) {
    if (control(a)[kVerdict] != kGood) return;
    if (a.root >= 0) {
        if (a.root == a.rank) return;
        copy(at<char>(a.out), theirs<char>(a, a.in, a.root), a.row_bytes,
             Int(blockIdx.x) * blockDim.x + threadIdx.x, Int(gridDim.x) * blockDim.x);
        return;
    }
    Part part = part_of(a);
    copy(at<char>(a.out) + part.peer * a.row_bytes,
         theirs<char>(a, a.in, part.peer) + a.rank * a.row_bytes, a.row_bytes, part.first, part.step);
}

#include "reductions.h"

// --- single words: by one thread ---------------------------------------------------------------------------

extern "C" __global__ void symm_signal(Args a) {  // compare: 0 sets, 1 adds
    if (threadIdx.x != 0 || control(a)[kBroken]) return;
    __threadfence_system();  // earlier puts of the stream
    Word* word = theirs<Word>(a, a.word, a.peer);
    if (a.compare == 0)
        store_release(word, Word(a.value));
    else
        fetch_add(word, Word(a.value));
}

extern "C" __global__ void symm_wait(Args a) {
    if (threadIdx.x != 0 || control(a)[kBroken]) return;
    Word value = Word(a.value);
    if (a.counter) value = *at<Word>(a.counter) += 1;
    Verdict came = wait_for(a, at<Word>(a.word), a.compare, value);
    if (came == kGood) return;
    if (is_news(a, came)) {
        for (Int p = 0; p < a.world; ++p) at<Word>(a.status)[kEach + 4 * p] = p != a.peer;
    }
    tell(a, came, a.peer, 0);
}

extern "C" __global__ void symm_fetch_add(Args a) {
    if (threadIdx.x == 0) *at<Word>(a.out) = fetch_add(theirs<Word>(a, a.word, a.peer), Word(a.value));
}

extern "C" __global__ void symm_compare_swap(Args a) {
    if (threadIdx.x == 0) {
        Word* word = theirs<Word>(a, a.word, a.peer);
        *at<Word>(a.out) = compare_swap(word, Word(a.expected), Word(a.value));
    }
}
