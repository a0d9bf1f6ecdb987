// A message of a process group in one native call, if it needs no other rank to act any more: a send that
// fits into the channel, or a receive of a message that has arrived. It numbers, records and runs the
// message. A receive that has to wait is numbered and recorded, and the queue runs it.
//
// All other messages, those with any error among them, are for the message queue alone
// (unicomm/comms/execution/message_queue.py).
#include <cstdint>
#include <mutex>
#include <optional>

#include "base/clock.hpp"
#include "shm/dispatch.hpp"
#include "shm/fast_calls.hpp"
#include "shm/p2p.hpp"

namespace unicomm {
namespace {

using shm::Group;

constexpr long kMostTag = INT32_MAX - 1;  // MOST_TAG of unicomm/comms/operations/call.py
constexpr int64_t kWithGil = 16 * 1024;   // bytes that are copied without releasing the GIL
// A caller that waits for its message waits here first. Meanwhile nobody looks for lost ranks and deadlocks,
// as the queue does.
constexpr double kWaitSeconds = 0.0005;

class SingleMessages {
  public:
    explicit SingleMessages(nb::object fast)
        : fast_(std::move(fast)),
          group_(fast_.attr("backend")),
          calls_(*nb::inst_ptr<FastCalls>(fast_)),
          g_(*nb::inst_ptr<Group>(group_)),
          next_pair_seq_(fast_.attr("next_pair_seq")) {}

    // Seconds that a receive may wait here. It ends its wait at once for any operation of another thread that
    // the fast path cannot take meanwhile.
    double patience = kWaitSeconds;

    // `tensors`: a list of one. `wait`: the caller waits for the message as soon as this returns.
    nb::object post(bool send, nb::handle tensors, nb::handle peer_arg, nb::handle tag_arg, bool wait) {
        Tensor t;
        if (calls_.blocked() || !PyList_CheckExact(tensors.ptr()) || list_size(tensors.ptr()) != 1)
            return nb::none();
        std::optional<long> peer = number(peer_arg), tag = number(tag_arg);
        if (!peer || *peer >= g_.world() || *peer == g_.rank() || !tag || *tag > kMostTag) return nb::none();
        if (!calls_.read(list_item(tensors.ptr(), 0), t)) return nb::none();
        std::unique_lock running(g_.running(), std::try_to_lock);
        if (!running || calls_.blocked()) return nb::none();

        const shm::Message message{send,    int(*peer),        shm::buffer_of(t),
                                   t.dtype, uint64_t(t.numel), uint32_t(*tag)};
        bool now = g_.single().can_run_at_once(message);
        if (!now && send) return nb::none();
        nb::object seq = next_pair_seq_(int(*peer), send);
        ring::NewRecord n = calls_.record_of_message(send, t, nb::cast<uint64_t>(seq), int(*peer));
        n.flags |= ring::kAsync;
        n.start_now = now || wait;  // else the queue starts it
        uint64_t record = calls_.begin(n);
        if (now && t.bytes <= kWithGil) {
            now = g_.single().run_at_once(message);
        } else if (now || wait) {
            FastCalls::Running listed(calls_, n.op, n.seq);
            GilReleased release;
            now = (now || waited(message)) && g_.single().run_at_once(message);
        }
        if (now) {
            calls_.writer().finish(record, ring::State::kCompleted, 0);
            return seq;
        }
        calls_.block();  // until the caller has queued it: no other operation may overtake it
        return nb::make_tuple(seq, n.op_id, record);
    }

  private:
    bool waited(const shm::Message& message) {
        FastCalls::GivesWay way(calls_);
        return g_.single().arrives(message, deadline_after(patience), [&] { return way.now(); });
    }

    // Returns the value of a small int that is not negative.
    static std::optional<long> number(nb::handle value) {
        if (!PyLong_CheckExact(value.ptr())) return {};
        long found = PyLong_AsLong(value.ptr());
        if (found == -1 && PyErr_Occurred()) PyErr_Clear();
        return found < 0 ? std::nullopt : std::optional(found);
    }

    nb::object fast_, group_;  // keeps them alive
    FastCalls& calls_;
    Group& g_;
    nb::object next_pair_seq_;
};

}  // namespace

void bind_single_messages(nb::module_& m) {
    nb::class_<SingleMessages>(m, "SingleMessages", "Messages of a process group that need not wait.")
        .def_rw("patience", &SingleMessages::patience, "Seconds that a receive waits in the core at most.")
        .def("post", &SingleMessages::post, nb::arg("send"), nb::arg("tensors").none(),
             nb::arg("peer").none(), nb::arg("tag").none(), nb::arg("wait"),
             nb::sig("def post(self, send: bool, tensors: object, peer: object, tag: object, wait: bool) -> "
                     "int | tuple[int, int, int] | None"),
             "Returns the message's number once it is complete. None: nothing has happened. (number, op_id, "
             "record): it has begun, the queue has to run it, and the fast path is blocked until then.");
    m.def(
        "single_messages",
        [](nb::object fast) -> nb::object {
            if (!nb::isinstance<FastCalls>(fast) || !nb::isinstance<Group>(fast.attr("backend")))
                return nb::none();
            return nb::cast(new SingleMessages(std::move(fast)), nb::rv_policy::take_ownership);
        },
        nb::arg("fast").none(), nb::sig("def single_messages(fast: object) -> SingleMessages | None"),
        "Returns those of a communicator with this fast path; None if it has none in memory.");
}

}  // namespace unicomm
