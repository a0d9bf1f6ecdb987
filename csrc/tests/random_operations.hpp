// Random valid operations of a rank, with a check of every result, for the tests of the native core, in which
// ranks are threads over one mapping.
#pragma once
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "operations/opcode.hpp"
#include "recorder/ring.hpp"
#include "shm/group.hpp"
#include "shm/memory/heap.hpp"

namespace unicomm::testing {

using shm::Buffer;
using shm::Group;
using shm::Heap;
using shm::Message;
using shm::Op;
using shm::Segment;

inline uint64_t limit_ns = 60ull * 1000000000;  // timeout of an operation

inline void (*on_failure)(const std::string& what) = nullptr;  // does not return

inline void expect(bool good, const std::string& what) {
    if (good) return;
    if (on_failure) on_failure(what);
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    std::abort();
}

inline Op op_of(OpCode code, uint64_t count, int root = -1, Red red = Red::kNone) {
    Op op;
    op.code = static_cast<uint32_t>(code);
    op.dtype = DType::kInt32;
    op.red = red;
    op.root = root;
    op.count = count;
    op.deadline_ns = now_ns() + limit_ns;
    return op;
}

inline int value(int rank, size_t i) { return rank * 1000 + static_cast<int>(i % 997); }

// Where the tensors of an operation are: one bit for each in turn, 1: in the shared heap.
inline thread_local uint32_t places = 0;

template <class T>
struct Somewhere {
    using value_type = T;
    Somewhere() = default;
    template <class U>
    Somewhere(const Somewhere<U>&) {}
    T* allocate(size_t n) {
        bool shared = places & 1;
        places = places >> 1 | places << 31;
        return static_cast<T*>(shared ? Heap::mine().allocate(n * sizeof(T)) : std::malloc(n * sizeof(T)));
    }
    void deallocate(T* p, size_t n) {
        if (Heap::holds(p, n * sizeof(T))) {
            Heap::release(p);
        } else {
            std::free(p);
        }
    }
    bool operator==(const Somewhere&) const { return true; }
};
using Data = std::vector<int, Somewhere<int>>;

// An operation that all ranks run.
struct Operation {
    enum Kind {
        kAllReduce,
        kReduce,
        kBroadcast,
        kAllGather,
        kReduceScatter,
        kAllToAll,
        kGather,
        kScatter,
        kBarrier,
        kRing,      // two messages to the next rank; by their tags, received in another order
        kChain,     // a message from rank to rank
        kFromAny,   // the root receives from whichever rank sends
        kMismatch,  // the root differs, on which the ranks agree: the group stays usable
        kKinds
    };
    static constexpr const char* kNames[kKinds] = {
        "all_reduce", "reduce",  "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather",
        "scatter",    "barrier", "ring",      "chain",      "from_any",       "mismatch"};

    int kind = kBarrier;
    size_t n = 0;  // elements of a tensor, or of a part of it
    int root = 0;
    uint32_t tag_a = 0, tag_b = 0;
    bool one_by_one = false;   // whether the two receives of the ring are two calls
    bool equal_parts = false;  // whether the all-to-all need not compare the sizes
    uint32_t places = 0;       // of its tensors; mixed with the rank unless 0 or ~0
    int salt = 0;              // makes the values of this operation different from those of others
};

inline Operation random_operation(std::mt19937& rng, int world, const std::vector<size_t>& sizes) {
    Operation o;
    o.kind = int(rng() % Operation::kKinds);
    o.n = sizes[rng() % sizes.size()];
    o.root = int(rng() % unsigned(world));
    o.tag_a = uint32_t(rng() % 3), o.tag_b = uint32_t(rng() % 3);
    // A receive from any rank would take messages of later operations with its tag.
    uint32_t own_tag = 1000 + uint32_t(rng() % 1000000);
    if (o.kind == Operation::kFromAny) o.tag_a = own_tag;
    o.one_by_one = rng() % 2;
    o.equal_parts = rng() % 2;
    uint32_t mixed = uint32_t(rng());
    o.places = rng() % 3 == 0 ? mixed : rng() % 2 ? 0 : ~uint32_t{0};
    return o;
}

// Runs one operation and returns its fault, if any; without a fault the results are checked. A mismatch that
// is as it must be counts as no fault.
class OperationRun {
  public:
    OperationRun(Group& group, const Operation& operation)
        : g(group), o(operation), n(o.n), me(g.rank()), world(g.world()), w(size_t(world)) {
        bool mixed = o.places != 0 && o.places != ~uint32_t{0};
        places = mixed ? uint32_t((o.places + unsigned(me)) * 2654435761u) : o.places;
    }

    Fault run() {
        switch (o.kind) {
            case Operation::kAllReduce:
            case Operation::kReduce:
                return reduce();
            case Operation::kBroadcast:
                return broadcast();
            case Operation::kAllGather:
            case Operation::kGather:
                return gather();
            case Operation::kReduceScatter:
                return reduce_scatter();
            case Operation::kAllToAll:
                return all_to_all();
            case Operation::kScatter:
                return scatter();
            case Operation::kRing:
                return ring();
            case Operation::kChain:
                return chain();
            case Operation::kFromAny:
                return from_any();
            case Operation::kMismatch:
                return mismatch();
            default:
                return g.barrier(op_of(OpCode::kBarrier, 0));
        }
    }

  private:
    int value_of(int rank, size_t i) const { return value(rank, i) + o.salt; }
    int sum_at(size_t i) const {
        int sum = 0;
        for (int r = 0; r < world; ++r) sum += value_of(r, i);
        return sum;
    }
    Data filled(int rank, size_t count) const {
        Data v(count);
        for (size_t i = 0; i < count; ++i) v[i] = value_of(rank, i);
        return v;
    }
    static Buffer buffer(Data& v, size_t from, size_t count) {
        return {reinterpret_cast<char*>(v.data() + from), count * sizeof(int)};
    }
    std::vector<Buffer> parts(Data& v) const {
        std::vector<Buffer> out;
        for (size_t r = 0; r < w; ++r) out.push_back(buffer(v, r * n, n));
        return out;
    }
    void check(const Data& v, size_t count, const std::function<int(size_t)>& right) const {
        for (size_t i = 0; i < count; ++i) {
            if (v[i] != right(i)) return expect(false, std::string(Operation::kNames[o.kind]) + " data");
        }
    }
    Message send(int to, Data& v, uint32_t tag) const {
        return {true, to, buffer(v, 0, n), DType::kInt32, n, tag};
    }
    Message receive(int from, Data& v, uint32_t tag) const {
        return {false, from, buffer(v, 0, n), DType::kInt32, n, tag};
    }
    static uint64_t deadline() { return now_ns() + limit_ns; }

    Fault reduce() {
        bool all = o.kind == Operation::kAllReduce, has = all || me == o.root;
        auto v = filled(me, n);
        char* p = reinterpret_cast<char*>(v.data());
        Op op = op_of(all ? OpCode::kAllReduce : OpCode::kReduce, n, all ? -1 : o.root, Red::kSum);
        if (Fault f = g.all_reduce(op, p, has ? p : nullptr, n)) return f;
        if (has) check(v, n, [&](size_t i) { return sum_at(i); });
        return {};
    }
    Fault broadcast() {
        auto v = filled(me, n);
        if (Fault f = g.broadcast(op_of(OpCode::kBroadcast, n, o.root), buffer(v, 0, n))) return f;
        check(v, n, [&](size_t i) { return value_of(o.root, i); });
        return {};
    }
    Fault gather() {
        bool all = o.kind == Operation::kAllGather, has = all || me == o.root;
        auto in = filled(me, n);
        Data out(has ? n * w : 0);
        std::vector<Buffer> outs;
        if (has) outs = parts(out);
        Op op = op_of(all ? OpCode::kAllGather : OpCode::kGather, n, all ? -1 : o.root);
        Fault f = all ? g.all_gather(op, buffer(in, 0, n), outs) : g.gather(op, buffer(in, 0, n), outs);
        if (f) return f;
        if (has) check(out, n * w, [&](size_t i) { return value_of(int(i / n), i % n); });
        return {};
    }
    Fault reduce_scatter() {
        auto in = filled(me, n * w);
        Data out(n);
        Op op = op_of(OpCode::kReduceScatter, n, -1, Red::kSum);
        if (Fault f = g.reduce_scatter(op, parts(in), buffer(out, 0, n))) return f;
        check(out, n, [&](size_t i) { return sum_at(size_t(me) * n + i); });
        return {};
    }
    Fault all_to_all() {
        auto in = filled(me, n * w);
        Data out(n * w);
        Op op = op_of(o.equal_parts ? OpCode::kAllToAllSingle : OpCode::kAllToAll, o.equal_parts ? n : 0);
        if (Fault f = g.all_to_all(op, parts(in), parts(out), !o.equal_parts)) return f;
        check(out, n * w, [&](size_t i) { return value_of(int(i / n), size_t(me) * n + i % n); });
        return {};
    }
    Fault scatter() {
        bool has = me == o.root;
        auto in = filled(me, has ? n * w : 0);
        Data out(n);
        std::vector<Buffer> ins;
        if (has) ins = parts(in);
        if (Fault f = g.scatter(op_of(OpCode::kScatter, n, o.root), ins, buffer(out, 0, n))) return f;
        check(out, n, [&](size_t i) { return value_of(o.root, size_t(me) * n + i); });
        return {};
    }
    Fault ring() {
        auto a = filled(me, n), b = filled(me + 100, n);
        Data ra(n), rb(n);
        int to = (me + 1) % world, from = (me + world - 1) % world;
        Message receive_a = receive(from, ra, o.tag_a), receive_b = receive(from, rb, o.tag_b);
        bool turned = o.tag_a != o.tag_b;
        std::vector<Message> batch{send(to, a, o.tag_a), send(to, b, o.tag_b), turned ? receive_b : receive_a,
                                   turned ? receive_a : receive_b};
        // One receive after the other: the message that the first has not the tag of is kept for the second.
        if (turned && o.one_by_one) {
            if (Fault f = g.exchange({batch[0], batch[1], batch[2]}, deadline())) return f;
            batch = {batch[3]};
        }
        if (Fault f = g.exchange(batch, deadline())) return f;
        check(ra, n, [&](size_t i) { return value_of(from, i); });
        check(rb, n, [&](size_t i) { return value_of(from + 100, i); });
        return {};
    }
    Fault chain() {
        Data v(n);
        if (me > 0) {
            if (Fault f = g.exchange({receive(me - 1, v, o.tag_a)}, deadline())) return f;
            check(v, n, [&](size_t i) { return value_of(me - 1, i); });
        }
        v = filled(me, n);
        return me + 1 < world ? g.exchange({send(me + 1, v, o.tag_a)}, deadline()) : Fault{};
    }
    Fault from_any() {
        if (me != o.root) {
            auto v = filled(me, n);
            return g.exchange({send(o.root, v, o.tag_a)}, deadline());
        }
        std::vector<Data> all(w - 1, Data(n));
        std::vector<Message> batch;
        for (Data& v : all) batch.push_back(receive(-1, v, o.tag_a));
        if (Fault f = g.exchange(batch, deadline())) return f;
        std::vector<int> seen(w);
        for (const Data& v : all) {
            if (n == 0) continue;
            int from = (v[0] - o.salt) / 1000;
            bool known = from >= 0 && from < world && from != me && seen[size_t(from)]++ == 0;
            expect(known, "from_any senders");
            if (known) check(v, n, [&](size_t i) { return value_of(from, i); });
        }
        return {};
    }
    Fault mismatch() {
        Fault f = g.barrier(op_of(OpCode::kBarrier, 0, me == o.root ? 1 : -1));
        bool right = f.code == FaultCode::kMismatch && (world == 2 || f.culprits == std::vector<int>{o.root});
        return right ? Fault{} : f ? f : Fault{FaultCode::kInternal, {}, {}, "no mismatch"};
    }

    Group& g;
    const Operation& o;
    size_t n;
    int me, world;
    size_t w;
};

inline Fault one_operation(Group& g, std::mt19937& rng) {
    static const std::vector<size_t> sizes{0, 1, 3, 16, 17, 1000, 20000, 70001, 200003};
    return OperationRun(g, random_operation(rng, g.world(), sizes)).run();
}

// Has some pairs of ranks, which are threads, read each other's long messages in place.
inline void offer_memory(Group& g) {
    std::vector<int> readers;
    for (int r = (g.rank() + 1) % 2; r < g.world(); r += 2) readers.push_back(r);
    g.offer_memory(std::vector<shm::Proof>(size_t(g.world()), shm::proof_of_reading()), readers);
}

inline void on_ranks(int world, const std::function<void(Group&)>& body) {
    auto segment = std::make_shared<Segment>(world, 64 * 1024, 64 * 1024);
    std::vector<int> pids(static_cast<size_t>(world), static_cast<int>(getpid()));
    std::vector<std::unique_ptr<Group>> groups;
    for (int r = 0; r < world; ++r) {
        groups.push_back(std::make_unique<Group>(segment, r, pids));
        offer_memory(*groups.back());
    }
    std::vector<std::thread> threads;
    for (auto& g : groups) threads.emplace_back([&] { body(*g); });
    for (auto& t : threads) t.join();
}

}  // namespace unicomm::testing
