#include "transport/fast.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/bind_fault.hpp"
#include "base/clock.hpp"
#include "operations/opcode.hpp"
#include "reduce/fold.hpp"
#include "shm/dispatch.hpp"
#include "transport/messages.hpp"

namespace unicomm::transport {
namespace {

using shm::cuts_input;
using shm::reduces;

constexpr uint64_t kForever = ~uint64_t{0};

// As `frame_of` of unicomm/backends/out_of_band/signatures.py packs it.
struct Head {
    uint64_t number;
    uint32_t code, dtype, red;
    int32_t root;
    uint64_t count, extra;
    char zeros[24];
};
static_assert(sizeof(Head) == Slots::kHead);

}  // namespace

// An operation that runs, until it ends: whether it is supervised.
class Fast::Running {
  public:
    Running(Fast& of, uint64_t deadline_ns)
        : of_(of), deadline_(deadline_ns), moment_(of.at_once_ ? 0 : deadline_after(of.moment)) {}
    ~Running() {
        if (supervised_ && !failed_) of_.ask("end");
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

    uint64_t moment() const { return std::min(moment_, deadline_); }
    // False if it must fail.
    bool supervise() {
        supervised_ = true;
        return !of_.ask("begin", deadline_ == kForever ? 1e12 : double(deadline_) * 1e-9);
    }
    // It stays under supervision, by which the error is found; whoever raises that ends it.
    void fails() {
        if (!supervised_) supervise();
        failed_ = true;
    }
    bool took_long() const { return supervised_ || now_ns() > moment_; }

  private:
    Fast& of_;
    const uint64_t deadline_, moment_;
    bool supervised_ = false, failed_ = false;
};

Fast::Fast(std::shared_ptr<Transport> transport, Slots* slots, nb::object counts, nb::handle supervisor)
    : SupervisedOperations(supervisor),
      transport_(std::move(transport)),
      slots_(slots),
      counts_object_(std::move(counts)),
      counts_(nb::cast<Counts&>(counts_object_)) {}

bool Fast::fits(OpCode code, size_t bytes) const {
    if (slots_ == nullptr || world() == 1) return false;
    switch (code) {
        case OpCode::kBarrier:
        case OpCode::kAllGatherSingle:
        case OpCode::kAllToAllSingle:
            return true;
        case OpCode::kAllReduce:
        case OpCode::kBroadcast:
            return bytes <= Slots::most(world());
        case OpCode::kReduceScatterSingle:
            return part_of(code, bytes) <= Slots::most_for_each(world());
        default:
            return false;
    }
}

// Bytes that one rank has for one other.
size_t Fast::part_of(OpCode code, size_t bytes) const {
    return cuts_input(code) ? bytes / size_t(world()) : bytes;
}

bool Fast::in_slots(OpCode code, size_t bytes) const {
    const size_t most = cuts_input(code) ? Slots::most_for_each(world()) : Slots::most(world());
    return part_of(code, bytes) <= std::min(most, Slots::kMostCopied);
}

// A collective begins. Called with the GIL.
void Fast::enter(uint32_t code) {
    ++counts_.entered;
    counts_.running = code;
    awaited_.clear();
    over_.clear();
}

bool Fast::begins(const shm::Op& op, const Tensor& in) {
    if (!fits(static_cast<OpCode>(op.code), size_t(in.bytes)) || !usable()) return false;
    enter(op.code);
    return true;
}

Fault Fast::run_alone(const shm::Op& op, const Tensor& in, const Tensor& out) {
    {
        nb::gil_scoped_acquire gil;
        enter(op.code);
    }
    at_once_ = true;
    Fault fault = collective(op, in, out);
    at_once_ = false;
    return fault;
}

bool Fast::begins(const std::vector<shm::Message>& messages) {
    if (!usable()) return false;
    awaited_.clear();
    over_.assign(messages.size(), false);
    for (const shm::Message& m : messages) {
        awaited_.emplace_back(m.peer, m.send, counts_.next(m.peer, m.send), int64_t(m.buffer.bytes));
    }
    return true;
}

void Fast::hear(const std::vector<int>& connections) {
    faults_ = epoll_create1(EPOLL_CLOEXEC);
    if (faults_ < 0) throw_errno("epoll_create1");
    for (int connection : connections) {
        epoll_event event{};
        event.events = EPOLLIN;
        if (epoll_ctl(faults_, EPOLL_CTL_ADD, connection, &event) != 0) throw_errno("epoll_ctl");
    }
}

// Whether another rank has told something that nobody has read yet.
bool Fast::told() const {
    epoll_event event;
    return faults_ >= 0 && epoll_wait(faults_, &event, 1, 0) > 0;
}

void Fast::close() {
    closed_ = true;
    if (faults_ >= 0) ::close(std::exchange(faults_, -1));
}

Ended Fast::waited(Running& running, const std::function<Ended(uint64_t)>& wait) {
    Ended how = wait(running.moment());
    if (how != Ended::kLate) return how;
    if (running.supervise()) return wait(kForever);
    // A rank that has told of a fault may have sent its data before.
    how = wait(0);
    return how == Ended::kLate ? Ended::kStopped : how;
}

Fault Fast::fault_of(Ended how) {
    if (how == Ended::kDone) return {};
    if (how == Ended::kSignal)
        transport_->drop();  // before the exception gives the tensors back to the program
    return failed("the communicator has ended");
}

// Runs an operation that takes its `Running`.
template <class Operation>
Fault Fast::guarded(uint64_t deadline_ns, Operation operation) {
    Running running(*this, deadline_ns);
    Fault fault;
    try {
        fault = operation(running);
    } catch (const Failure& failure) {
        fault = failed(failure.what());
    }
    if (fault && fault.code != FaultCode::kMismatch) running.fails();
    counts_.running = 0;
    return fault;
}

Fault Fast::swap(Running& running, Slots& slots, const void* head, Piece first,
                 const std::vector<Piece>& pieces) {
    if (pieces.size() == 1) {
        slots.start_same(static_cast<const char*>(head), first, pieces[0]);
    } else {
        slots.start(static_cast<const char*>(head), first, pieces);
    }
    Fault fault = fault_of(waited(running, [&](uint64_t limit) {
        return transport_->wait([&] { return slots.arrived() && transport_->flushed(); }, limit);
    }));
    return fault ? fault : given_up(running);
}

// A rank that was stopped, here or before, may find the data of ranks that have given the operation up
// since. The number stays: nothing else begins meanwhile.
Fault Fast::given_up(const Running& running) {
    // In this order: what is no longer unread is being read, and what was read has stopped the transport.
    const bool looks = running.took_long() || told() || counts_.hearing || transport_->stopped();
    return looks && ask("given_up", counts_.entered) ? failed("it was given up") : Fault{};
}

Fault Fast::collective(const shm::Op& op, const Tensor& in, const Tensor& out) {
    return guarded(op.deadline_ns, [&](Running& running) -> Fault {
        const auto code = static_cast<OpCode>(op.code);
        const Head head{counts_.entered, op.code,  uint32_t(op.dtype), uint32_t(op.red),
                        op.root,         op.count, op.extra,           {}};
        const bool few = in_slots(code, size_t(in.bytes));
        const bool gives =
            few && code != OpCode::kBarrier && (code != OpCode::kBroadcast || op.root == rank());
        std::vector<Piece> pieces{{static_cast<const char*>(in.data), gives ? size_t(in.bytes) : 0}};
        if (few && cuts_input(code)) {
            const size_t part = part_of(code, size_t(in.bytes));
            const char* const from = pieces[0].data;
            pieces.clear();
            for (int r = 0; r < world(); ++r) pieces.push_back({from + size_t(r) * part, part});
        }
        if (Fault fault = swap(running, *slots_, &head, {}, pieces)) return fault;
        if (!slots_->alike()) return {FaultCode::kMismatch, {}, {}, {}};
        if (!few) return trade(running, op, in, out, {});
        take(op, in, out);
        return {};
    });
}

Fault Fast::all_to_others(const shm::Op& op, const Tensor& in, const Tensor& out,
                          const std::vector<int>& apart) {
    return guarded(op.deadline_ns, [&](Running& running) { return trade(running, op, in, out, apart); });
}

// Every rank sends its part for each other one, or all it has, from its tensor: to the other's tensor, or to
// the slots if the parts are to be folded. Parts of the ranks `apart` stay.
Fault Fast::trade(Running& running, const shm::Op& op, const Tensor& in, const Tensor& out,
                  const std::vector<int>& apart) {
    const auto code = static_cast<OpCode>(op.code);
    const size_t part = part_of(code, size_t(in.bytes)), stride = cuts_input(code) ? part : 0;
    const bool to_all = code == OpCode::kBroadcast;
    auto stays = [&](int r) { return std::find(apart.begin(), apart.end(), r) != apart.end(); };
    const char* const from = static_cast<const char*>(in.data);
    char* const to = static_cast<char*>(out.data);
    auto place = [&](int peer) {
        return reduces(code) ? slots_->room_of(peer) : to_all ? to : to + size_t(peer) * part;
    };
    Group messages(*transport_);
    // Receives first: what arrives then has its place.
    for (int step = 1; step < world(); ++step) {
        const int peer = (rank() + world() - step) % world();
        if (stays(peer) || (to_all && peer != op.root)) continue;
        messages.add_receive(transport_->receive(peer, place(peer), part, Kind::kShare), part);
    }
    for (int step = 1; step < world(); ++step) {
        const int peer = (rank() + step) % world();
        if (stays(peer) || (to_all && rank() != op.root)) continue;
        messages.add_send(transport_->send(peer, from + size_t(peer) * stride, part, Kind::kShare));
    }
    const char* const own = from + size_t(rank()) * stride;
    if (!reduces(code) && !to_all && !stays(rank())) std::memcpy(place(rank()), own, part);
    Fault fault = fault_of(waited(running, [&](uint64_t limit) {
        return transport_->wait([&] { return messages.over() && transport_->flushed(); }, limit);
    }));
    if (!fault) fault = given_up(running);
    if (fault || !reduces(code)) return fault;
    std::vector<const void*> sources;
    for (int r = 0; r < world(); ++r) sources.push_back(r == rank() ? own : place(r));
    fold_parts(op, out, sources);
    return {};
}

void Fast::fold_parts(const shm::Op& op, const Tensor& out, const std::vector<const void*>& sources) const {
    if (!fold(op.dtype, op.red, static_cast<char*>(out.data), sources.data(), world(),
              int64_t(out.bytes) / dtype_bytes(op.dtype), nullptr, world())) {
        throw Failure("the reduction is not defined");  // checked before
    }
}

Fault Fast::swap_slots(Slots& slots, Piece first, const std::vector<Piece>& pieces, uint64_t deadline_ns) {
    static constexpr char kNoHead[Slots::kHead] = {};
    counts_.running = uint32_t(OpCode::kBarrier);
    return guarded(deadline_ns,
                   [&](Running& running) { return swap(running, slots, kNoHead, first, pieces); });
}

// Those that ask where this rank is do not hear of these messages any more.
void Fast::note_over(const std::vector<Finished>& finished) {
    with_end_of_python([&] {
        nb::gil_scoped_acquire gil;
        for (const Finished& f : finished) over_.at(size_t(f.number)) = true;
    });
    ask("completed");
}

std::vector<Fast::Awaited> Fast::awaited() const {
    std::vector<Awaited> left;
    for (size_t i = 0; i < awaited_.size(); ++i) {
        if (!over_[i]) left.push_back(awaited_[i]);
    }
    return left;
}

const char* Fast::slot_of(int rank, size_t bytes) const {
    if (slots_->bytes(rank) != bytes) throw Failure("a slot of another size");
    return slots_->data(rank);
}

void Fast::take(const shm::Op& op, const Tensor& in, const Tensor& out) {
    const auto code = static_cast<OpCode>(op.code);
    const int size = world();
    char* const to = static_cast<char*>(out.data);
    const size_t part = part_of(code, size_t(in.bytes));  // what every rank's slot has for this one
    if (reduces(code)) {
        std::vector<const void*> sources;
        for (int r = 0; r < size; ++r) sources.push_back(slot_of(r, part));
        fold_parts(op, out, sources);
    } else if (code == OpCode::kBroadcast) {
        if (op.root != rank() && part != 0) std::memcpy(to, slot_of(op.root, part), part);
    } else if (code != OpCode::kBarrier && part != 0) {
        for (int r = 0; r < size; ++r) std::memcpy(to + size_t(r) * part, slot_of(r, part), part);
    }
}

Fault Fast::exchange(const std::vector<shm::Message>& messages, uint64_t deadline_ns) {
    return guarded(deadline_ns, [&](Running& running) -> Fault {
        Messages under_way(transport_);
        // Receives first: what arrives then has its place.
        for (const bool send : {false, true}) {
            for (size_t i = 0; i < messages.size(); ++i) {
                const shm::Message& m = messages[i];
                if (m.send != send) continue;
                under_way.add(int(i), send, m.peer, m.buffer.data, size_t(m.buffer.bytes), m.tag);
            }
        }
        std::vector<Finished> over;
        auto wait = [&](uint64_t limit) {
            for (;;) {
                // In the moment all at once. Afterwards each one is noted, as others may ask what is lacking.
                const Ended how = under_way.wait(limit, limit == running.moment(), false);
                const std::vector<Finished> finished = under_way.take();
                over.insert(over.end(), finished.begin(), finished.end());
                if (how == Ended::kDone && over.size() == messages.size()) return how;
                if (!finished.empty()) note_over(finished);
                if (how != Ended::kDone) return how;
            }
        };
        if (Fault fault = fault_of(waited(running, wait))) return fault;
        for (const Finished& f : over) {
            const shm::Message& m = messages[size_t(f.number)];
            if (!m.send && f.length != m.buffer.bytes &&
                ask("odd_size", f.peer, int64_t(m.buffer.bytes), int64_t(f.length))) {
                return failed("a message of another size");
            }
        }
        return {};
    });
}

}  // namespace unicomm::transport
