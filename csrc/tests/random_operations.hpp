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

inline void expect(bool good, const std::string& what) {
    if (good) return;
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

// Puts half of the tensors into the shared heap, alternating in each thread: some operations have all of
// their tensors there, some none, most some.
template <class T>
struct Somewhere {
    using value_type = T;
    Somewhere() = default;
    template <class U>
    Somewhere(const Somewhere<U>&) {}
    T* allocate(size_t n) {
        static thread_local unsigned turn = 0;
        bool shared = turn++ / 8 % 2;
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

inline Data filled(int rank, size_t n) {
    Data v(n);
    for (size_t i = 0; i < n; ++i) v[i] = value(rank, i);
    return v;
}

inline Buffer buffer(Data& v, size_t from, size_t n) {
    return {reinterpret_cast<char*>(v.data() + from), n * sizeof(int)};
}

inline int sum_at(int world, size_t i) {
    int s = 0;
    for (int r = 0; r < world; ++r) s += value(r, i);
    return s;
}

// Runs one operation and returns its fault, if any; without a fault the results are checked. One kind is a
// mismatch on which the ranks agree: it counts as no fault.
inline Fault one_operation(Group& g, std::mt19937& rng) {
    const size_t sizes[] = {0, 1, 3, 16, 17, 1000, 20000, 70001, 200003};
    size_t n = sizes[rng() % 9];
    int world = g.world(), me = g.rank(), root = static_cast<int>(rng() % static_cast<unsigned>(world));
    auto w = static_cast<size_t>(world);
    switch (rng() % 8) {
        case 0: {
            auto v = filled(me, n);
            char* p = reinterpret_cast<char*>(v.data());
            if (Fault f = g.all_reduce(op_of(OpCode::kAllReduce, n, -1, Red::kSum), p, p, n)) return f;
            for (size_t i = 0; i < n; ++i) expect(v[i] == sum_at(world, i), "all_reduce data");
            break;
        }
        case 1: {
            auto v = filled(me, n);
            if (Fault f = g.broadcast(op_of(OpCode::kBroadcast, n, root), buffer(v, 0, n))) return f;
            for (size_t i = 0; i < n; ++i) expect(v[i] == value(root, i), "broadcast data");
            break;
        }
        case 2: {
            auto in = filled(me, n);
            Data out(n * w);
            std::vector<Buffer> outs;
            for (size_t r = 0; r < w; ++r) outs.push_back(buffer(out, r * n, n));
            if (Fault f = g.all_gather(op_of(OpCode::kAllGather, n), buffer(in, 0, n), outs)) return f;
            for (size_t i = 0; i < n * w; ++i) {
                expect(out[i] == value(static_cast<int>(i / n), i % n), "all_gather data");
            }
            break;
        }
        case 3: {
            auto in = filled(me, n * w);
            Data out(n);
            std::vector<Buffer> ins;
            for (size_t r = 0; r < w; ++r) ins.push_back(buffer(in, r * n, n));
            Op op = op_of(OpCode::kReduceScatter, n, -1, Red::kSum);
            if (Fault f = g.reduce_scatter(op, ins, buffer(out, 0, n))) return f;
            for (size_t i = 0; i < n; ++i) {
                expect(out[i] == sum_at(world, static_cast<size_t>(me) * n + i), "reduce_scatter data");
            }
            break;
        }
        case 4: {
            auto in = filled(me, n * w);
            Data out(n * w);
            std::vector<Buffer> ins, outs;
            for (size_t r = 0; r < w; ++r) {
                ins.push_back(buffer(in, r * n, n));
                outs.push_back(buffer(out, r * n, n));
            }
            if (Fault f = g.all_to_all(op_of(OpCode::kAllToAll, 0), ins, outs, true)) return f;
            for (size_t i = 0; i < n * w; ++i) {
                expect(out[i] == value(static_cast<int>(i / n), static_cast<size_t>(me) * n + i % n),
                       "all_to_all data");
            }
            break;
        }
        case 5:
            if (Fault f = g.barrier(op_of(OpCode::kBarrier, 0))) return f;
            break;
        case 6: {  // a ring, with two messages each way in one batch; by their tags, in another order
            auto a = filled(me, n), b = filled(me + 100, n);
            Data ra(n), rb(n);
            int to = (me + 1) % world, from = (me + world - 1) % world;
            uint32_t tag_a = uint32_t(rng() % 3), tag_b = uint32_t(rng() % 3);
            Message receive_a{false, from, buffer(ra, 0, n), DType::kInt32, n, tag_a};
            Message receive_b{false, from, buffer(rb, 0, n), DType::kInt32, n, tag_b};
            bool turned = tag_a != tag_b;
            std::vector<Message> batch{{true, to, buffer(a, 0, n), DType::kInt32, n, tag_a},
                                       {true, to, buffer(b, 0, n), DType::kInt32, n, tag_b},
                                       turned ? receive_b : receive_a,
                                       turned ? receive_a : receive_b};
            // One receive after the other: the message that the first has not the tag of is kept for the
            // second.
            if (turned && rng() % 2) {
                std::vector<Message> first{batch[0], batch[1], batch[2]}, second{batch[3]};
                if (Fault f = g.exchange(first, now_ns() + limit_ns)) return f;
                batch = second;
            }
            if (Fault f = g.exchange(batch, now_ns() + limit_ns)) return f;
            for (size_t i = 0; i < n; ++i) {
                expect(ra[i] == value(from, i) && rb[i] == value(from + 100, i), "exchange data");
            }
            break;
        }
        default: {  // a mismatch leaves the group usable
            Op op = op_of(OpCode::kBarrier, 0, me == root ? 1 : -1);
            Fault f = g.barrier(op);
            bool right =
                f.code == FaultCode::kMismatch && (world == 2 || f.culprits == std::vector<int>{root});
            if (!right) return f ? f : Fault{FaultCode::kInternal, {}, {}, "no mismatch"};
        }
    }
    return {};
}

inline void on_ranks(int world, const std::function<void(Group&)>& body) {
    auto segment = std::make_shared<Segment>(world, 64 * 1024, 64 * 1024);
    std::vector<int> pids(static_cast<size_t>(world), static_cast<int>(getpid()));
    std::vector<std::unique_ptr<Group>> groups;
    for (int r = 0; r < world; ++r) groups.push_back(std::make_unique<Group>(segment, r, pids));
    std::vector<std::thread> threads;
    for (auto& g : groups) threads.emplace_back([&] { body(*g); });
    for (auto& t : threads) t.join();
}

}  // namespace unicomm::testing
