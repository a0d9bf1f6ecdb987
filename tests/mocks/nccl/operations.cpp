#include "operations.hpp"

#include <algorithm>
#include <cstring>
#include <functional>

#include "group.hpp"

namespace mock_nccl {
namespace {

constexpr size_t kBlock = 256 * 1024;  // bytes of a reduction that are on their way at once
constexpr int kPreMultiply = 1000;     // how all ranks call their own operations in signatures

// A collective in rounds: messages to and from the peers, then local work.
struct Collective : Operation {
    using Operation::Operation;
    std::vector<Transfer> transfers;
    std::function<bool(Collective&)> next;  // fills the transfers of the next round; false when there is none
    std::function<void()> after = nullptr;  // what follows the round's messages
    bool running = false;

    bool step() override {
        bool any = false;
        for (;;) {
            if (!running && !next(*this)) {
                done = true;
                return true;
            }
            running = true;
            bool all_done;
            any |= step_transfers(transfers, &all_done);
            if (!all_done) return any;
            if (after) after();
            transfers.clear();
            running = false;
            any = true;
        }
    }
    std::unique_ptr<Operation> again() const override { return std::make_unique<Collective>(*this); }
    void send(int to, const void* data, size_t bytes) {
        transfers.push_back(Transfer::send(kCollective, comm->rank, to, data, bytes, false));
    }
    void receive(int from, void* data, size_t bytes) {
        transfers.push_back(Transfer::receive(kCollective, comm->rank, from, data, bytes));
    }
};

struct PointToPoint : Operation {
    std::vector<Transfer> transfer;
    PointToPoint(CommPtr c, bool sending, void* data, size_t count, int dtype, int peer)
        : Operation(std::move(c), "point to point", dtype, -1, -1, count) {
        queue = {kPointToPoint, peer, sending};
        size_t bytes = count * size_of(dtype);
        transfer.push_back(sending ? Transfer::send(kPointToPoint, comm->rank, peer, data, bytes, true)
                                   : Transfer::receive(kPointToPoint, comm->rank, peer, data, bytes));
    }
    bool step() override { return step_transfers(transfer, &done); }
    std::unique_ptr<Operation> again() const override { return std::make_unique<PointToPoint>(*this); }
};

bool has_buffer(Call& call, const void* buffer, const char* what) {
    if (buffer || call.count == 0) return true;
    call.error = call.fail(kInvalidArgument, std::string(what) + " is NULL");
    return false;
}

// The checks of every operation; `root` is INT_MIN where there is none. False with call.error set.
bool check(Call& call, CommHandle handle, int root, bool needs_send, bool needs_recv) {
    if (root != INT_MIN) call.root = root;
    if (!usable(call, handle)) return false;
    if (root != INT_MIN && !known_rank(call, root, "root")) return false;
    return known_type(call, call.dtype) && (!needs_send || has_buffer(call, call.send, "sendbuff")) &&
           (!needs_recv || has_buffer(call, call.recv, "recvbuff"));
}

bool is_root(const Call& call, CommHandle handle, int root) {
    Call look(call.function);
    return look.find(handle) && look.comm->rank == root;
}

struct Folding {
    Reduction reduction;
    const void* device_scalar = nullptr;
};

bool find_reduction(Call& call, int op, Folding* folding) {
    call.op = op;
    if (op >= 0 && op < kFirstOwnOp) {
        folding->reduction.op = static_cast<RedOp>(op);
        return true;
    }
    std::lock_guard lock(call.comm->mutex);
    auto found = call.comm->reductions.find(op);
    if (found != call.comm->reductions.end() && found->second.dtype == call.dtype) {
        folding->reduction = found->second.reduction;
        folding->device_scalar = found->second.device_scalar;
        return true;
    }
    call.extra += ",\"op\":" + std::to_string(op);
    call.op = -1;
    return false;
}

std::unique_ptr<Collective> make(const Call& call, int op, int root) {
    auto c = std::make_unique<Collective>(call.comm, call.function, call.dtype,
                                          op < kFirstOwnOp ? op : kPreMultiply, root, call.count);
    c->queue = {kCollective, 0, false};
    return c;
}

// One round of plain messages.
Result move(Call& call, int root, std::function<void(Collective&, size_t bytes)> round) {
    if (call.count == 0) return call.done();
    auto c = make(call, -1, root);
    c->next = [round = std::move(round), bytes = call.count * size_of(call.dtype),
               begun = false](Collective& self) mutable {
        if (begun) return false;
        begun = true;
        round(self, bytes);
        return true;
    };
    return submit(call, std::move(c));
}

void copy(void* to, const void* from, size_t bytes) {
    if (to != from) memmove(to, from, bytes);
}
const char* at(const void* base, size_t offset) { return static_cast<const char*>(base) + offset; }
char* at(void* base, size_t offset) { return static_cast<char*>(base) + offset; }

enum class Goal { kAll, kRoot, kScattered };

// Every rank that gets a result gets all contributions and reduces them itself, in rank order: the same bits
// everywhere.
Result fold(Call& call, int op, int root, Goal goal) {
    Folding folding;
    if (!find_reduction(call, op, &folding))
        return failed(
            call.fail(kInvalidArgument, "no reduction " + std::to_string(op) + " for this data type"));
    if (call.count == 0) return call.done();
    auto c = make(call, op, root);
    const void* in = call.send;
    void* out = call.recv;
    int dtype = call.dtype, n = call.comm->nranks, me = call.comm->rank;
    size_t size = size_of(dtype), count = call.count, block = kBlock / size;
    std::vector<std::vector<char>> others(n);
    if (goal != Goal::kRoot || me == root)
        for (int r = 0; r < n; ++r)
            if (r != me) others[r].resize(std::min(block, count) * size);
    c->next = [=, others = std::move(others), start = size_t{0}](Collective& self) mutable {
        if (start == 0 && folding.device_scalar)
            memcpy(folding.reduction.scalar, folding.device_scalar, size);
        if (start >= count) return false;
        size_t here = std::min(block, count - start), bytes = here * size;
        bool gets = goal != Goal::kRoot || me == root;
        auto part = [=](int of) {
            return at(in, ((goal == Goal::kScattered ? of * count : 0) + start) * size);
        };
        std::vector<const void*> inputs(n);
        for (int r = 0; r < n; ++r) {
            inputs[r] = r == me ? part(me) : others[r].data();
            if (r == me) continue;
            if (goal != Goal::kRoot || r == root) self.send(r, part(r), bytes);
            if (gets) self.receive(r, others[r].data(), bytes);
        }
        self.after = nullptr;
        if (gets)
            self.after = [=, reduction = folding.reduction, to = at(out, start * size)] {
                reduce(to, inputs.data(), n, here, dtype, reduction);
            };
        start += here;
        return true;
    };
    return submit(call, std::move(c));
}

}  // namespace

bool known_type(Call& call, int dtype) {
    bool fp8 = dtype == kFloat8e4m3 || dtype == kFloat8e5m2;
    if (fp8 && !is_rccl() && version() < 22400) dtype = -1;
    if (dtype >= 0 && dtype < kDataTypes) return true;
    call.error = call.fail(kInvalidArgument, "no data type " + std::to_string(call.dtype));
    return false;
}

bool known_rank(Call& call, int rank, const char* what) {
    if (rank >= 0 && rank < call.comm->nranks) return true;
    call.error =
        call.fail(kInvalidArgument, std::string(what) + " " + std::to_string(rank) + " is outside of 0 to " +
                                        std::to_string(call.comm->nranks - 1));
    return false;
}

bool usable(Call& call, CommHandle handle) {
    if (!call.find_ready(handle)) return false;
    if (!call.comm->finalized && !call.comm->revoked) return true;
    call.error = call.fail(
        kInvalidUsage, call.comm->revoked ? "the communicator is revoked" : "the communicator is finalized");
    return false;
}

Call begin(const char* name, const void* send, void* recv, size_t count, int dtype, StreamHandle stream) {
    Call call(name);
    call.send = send, call.recv = recv, call.count = static_cast<long long>(count), call.dtype = dtype;
    call.stream = stream, call.has_stream = true;
    return call;
}

Result point_to_point(Call call, bool sending, void* data, int peer, CommHandle handle) {
    call.peer = peer;
    if (!check(call, handle, INT_MIN, sending, !sending) || !known_rank(call, peer, "peer"))
        return failed(call.error);
    return submit(call,
                  std::make_unique<PointToPoint>(call.comm, sending, data, call.count, call.dtype, peer));
}

Result broadcast(Call call, const void* send, void* recv, int root, CommHandle handle) {
    if (!check(call, handle, root, is_root(call, handle, root), true)) return failed(call.error);
    return move(call, root, [=](Collective& c, size_t bytes) {
        if (c.comm->rank != root) return c.receive(root, recv, bytes);
        for (int r = 0; r < c.comm->nranks; ++r)
            if (r != root) c.send(r, send, bytes);
        c.after = [=] { copy(recv, send, bytes); };
    });
}

Result all_to_all(Call call, const void* send, void* recv, CommHandle handle) {
    if (!check(call, handle, INT_MIN, true, true)) return failed(call.error);
    if (send == recv && call.count && call.comm->nranks > 1)
        return failed(call.fail(kInvalidUsage, "all-to-all cannot be in place"));
    return move(call, -1, [=](Collective& c, size_t bytes) {
        int me = c.comm->rank;
        copy(at(recv, me * bytes), at(send, me * bytes), bytes);
        for (int r = 0; r < c.comm->nranks; ++r) {
            if (r == me) continue;
            c.send(r, at(send, r * bytes), bytes);
            c.receive(r, at(recv, r * bytes), bytes);
        }
    });
}

Result gather(Call call, const void* send, void* recv, int root, CommHandle handle) {
    if (!check(call, handle, root, true, is_root(call, handle, root))) return failed(call.error);
    return move(call, root, [=](Collective& c, size_t bytes) {
        if (c.comm->rank != root) return c.send(root, send, bytes);
        copy(at(recv, root * bytes), send, bytes);
        for (int r = 0; r < c.comm->nranks; ++r)
            if (r != root) c.receive(r, at(recv, r * bytes), bytes);
    });
}

Result scatter(Call call, const void* send, void* recv, int root, CommHandle handle) {
    if (!check(call, handle, root, is_root(call, handle, root), true)) return failed(call.error);
    return move(call, root, [=](Collective& c, size_t bytes) {
        if (c.comm->rank != root) return c.receive(root, recv, bytes);
        for (int r = 0; r < c.comm->nranks; ++r)
            if (r != root) c.send(r, at(send, r * bytes), bytes);
        c.after = [=] { copy(recv, at(send, root * bytes), bytes); };
    });
}

Result all_gather(Call call, const void* send, void* recv, CommHandle handle) {
    if (!check(call, handle, INT_MIN, true, true)) return failed(call.error);
    return move(call, -1, [=](Collective& c, size_t bytes) {
        int me = c.comm->rank;
        copy(at(recv, me * bytes), send, bytes);
        for (int r = 0; r < c.comm->nranks; ++r) {
            if (r == me) continue;
            c.send(r, send, bytes);
            c.receive(r, at(recv, r * bytes), bytes);
        }
    });
}

Result all_reduce(Call call, int op, CommHandle handle) {
    if (!check(call, handle, INT_MIN, true, true)) return failed(call.error);
    return fold(call, op, -1, Goal::kAll);
}

Result reduce_to(Call call, int op, int root, CommHandle handle) {
    if (!check(call, handle, root, true, is_root(call, handle, root))) return failed(call.error);
    return fold(call, op, root, Goal::kRoot);
}

Result reduce_scatter(Call call, int op, CommHandle handle) {
    if (!check(call, handle, INT_MIN, true, true)) return failed(call.error);
    return fold(call, op, -1, Goal::kScattered);
}

Result all_to_all_v(Call call, const void* send, const size_t* counts, const size_t* from, void* recv,
                    const size_t* recv_counts, const size_t* to, CommHandle handle) {
    if (!check(call, handle, INT_MIN, false, false)) return failed(call.error);
    if (!counts || !from || !recv_counts || !to)
        return failed(call.fail(kInvalidArgument, "counts are NULL"));
    int n = call.comm->nranks;
    std::vector<size_t> c(counts, counts + n), f(from, from + n), rc(recv_counts, recv_counts + n),
        t(to, to + n);
    return move(call, -1, [=](Collective& self, size_t size) {
        for (int r = 0; r < n; ++r) {
            if (r == self.comm->rank) {
                copy(at(recv, t[r] * size), at(send, f[r] * size), std::min(c[r], rc[r]) * size);
                continue;
            }
            self.send(r, at(send, f[r] * size), c[r] * size);
            self.receive(r, at(recv, t[r] * size), rc[r] * size);
        }
    });
}

}  // namespace mock_nccl
