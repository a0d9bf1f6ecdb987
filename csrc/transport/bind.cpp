// Bindings of what is the same over each engine. Tensors come in as addresses and sizes, which are checked
// before.
#include "base/bind.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>

#include "base/bind_fault.hpp"
#include "base/clock.hpp"
#include "reduce/fold.hpp"
#include "shm/dispatch.hpp"
#include "transport/bound.hpp"
#include "transport/collectives.hpp"
#include "transport/fast.hpp"
#include "transport/messages.hpp"

namespace unicomm {
namespace {

using namespace transport;

char* memory(uintptr_t address) { return reinterpret_cast<char*>(address); }

template <class F>
void run(Transport& transport, F operation) {
    Ended ended;
    {
        GilReleased released;
        ended = operation();
    }
    settle(transport, ended);
}

bool gather(Bound& of, const nb::bytes& head, uintptr_t data, size_t bytes) {
    if (head.size() != Slots::kHead) throw nb::value_error("a head has 64 bytes");
    run(*of.transport, [&] { return of.slots.gather(head.c_str(), memory(data), bytes); });
    return of.slots.alike();
}

// `bytes` of a rank's data, which have to be `all`.
const char* part(const Bound& of, int rank, size_t bytes, size_t at, size_t all) {
    if (of.slots.bytes(rank) != all) throw Failure("a slot of another size");
    if (bytes > all || at > all - bytes) throw nb::value_error("not a part of a slot");
    return of.slots.data(rank) + at;
}

// `Fast` with what it uses.
struct BoundFast final : Fast {
    BoundFast(nb::object of, bool compares, nb::object counts, nb::handle supervisor)
        : Fast(nb::cast<Bound&>(of).transport, compares ? &nb::cast<Bound&>(of).slots : nullptr,
               std::move(counts), supervisor),
          transport(std::move(of)) {}
    nb::object transport;
};

// The tensors are dense and checked, or None for a barrier.
nb::object run_general(SupervisedOperations& operations, uint32_t code, int dtype, int red, int root,
                       uint64_t count, uint64_t extra, double timeout, nb::object input, nb::object output) {
    const shm::Op op = shm::op_of(code, dtype, red, root, count, extra, timeout);
    Tensor in, out;
    if (!input.is_none() && !read_tensor(input.ptr(), in)) throw nb::python_error();
    if (!output.is_none() && !read_tensor(output.ptr(), out)) throw nb::python_error();
    Fault fault;
    {
        GilReleased release;
        fault = operations.run(op, in, out);
    }
    return fault_tuple(fault);
}

struct BoundMessages {
    explicit BoundMessages(const Bound& of) : transport(of.transport), messages(transport) {}
    std::shared_ptr<Transport> transport;
    Messages messages;

    // None if the transport was stopped, else the messages that are over.
    std::optional<std::vector<std::tuple<int, int, int64_t>>> wait(double limit, bool all) {
        Ended ended;
        {
            GilReleased released;
            ended = messages.wait(deadline_after(limit), all, !all);
        }
        if (ended == Ended::kStopped) return std::nullopt;
        if (ended == Ended::kSignal) settle(*transport, ended);
        if (ended == Ended::kLate && all) return std::nullopt;
        std::vector<std::tuple<int, int, int64_t>> found;
        for (const Finished& f : messages.take()) found.emplace_back(f.number, f.peer, int64_t(f.length));
        return found;
    }
};

void bind_bound(nb::module_& m) {
    m.def("most_in_slot", &Slots::most, nb::arg("size"),
          "Bytes of a rank's data that travel with what it calls, if all of so many ranks need them.");
    nb::class_<Bound>(m, "Transport", "What carries one communicator's messages.")
        .def(
            "stop", [](Bound& w) { w.transport->stop(); }, "By any thread: ends all waits from now on.")
        .def(
            "rouse", [](Bound& w) { w.transport->rouse(); }, "By any thread: ends a wait for messages.")
        .def(
            "flush",
            [](Bound& w, double seconds) {
                GilReleased released;
                return w.transport->flush(deadline_after(seconds)) == Ended::kDone;
            },
            nb::arg("seconds"), "Waits until the system has all that was sent.")
        .def(
            "drop", [](Bound& w) { return w.transport->drop(); }, nb::call_guard<nb::gil_scoped_release>(),
            "Ends the connections. Returns False if the memory of messages may still be touched.")
        .def(
            "forget", [](Bound& w) { w.transport->forget(); },
            "For a forked child: lets go without a word to anybody.")
        .def("gather", &gather, nb::arg("head"), nb::arg("data"), nb::arg("bytes"),
             "Exchanges slots with all ranks. Returns whether they call the same.")
        .def(
            "slot_head", [](Bound& w, int rank) { return nb::bytes(w.slots.head(rank), Slots::kHead); },
            nb::arg("rank"))
        .def(
            "slot_data",
            [](Bound& w, int rank) { return nb::bytes(w.slots.data(rank), w.slots.bytes(rank)); },
            nb::arg("rank"))
        .def(
            "take_slot",
            [](Bound& w, int rank, uintptr_t to, size_t bytes, size_t at, size_t all) {
                std::memcpy(memory(to), part(w, rank, bytes, at, all), bytes);
            },
            nb::arg("rank"), nb::arg("to"), nb::arg("bytes"), nb::arg("at"), nb::arg("all"),
            "Copies a part of a rank's data, which are `all` bytes.")
        .def(
            "fold_slots",
            [](Bound& w, uintptr_t to, size_t bytes, size_t at, size_t all, uint8_t dtype, int red,
               const std::vector<double>& factors) {
                const int size = w.transport->size();
                std::vector<const void*> sources;
                for (int rank = 0; rank < size; ++rank) sources.push_back(part(w, rank, bytes, at, all));
                const auto type = static_cast<DType>(dtype);
                return fold(type, static_cast<Red>(red), memory(to), sources.data(), size,
                            int64_t(bytes) / dtype_bytes(type), factors.empty() ? nullptr : factors.data(),
                            size);
            },
            nb::arg("to"), nb::arg("bytes"), nb::arg("at"), nb::arg("all"), nb::arg("dtype"), nb::arg("red"),
            nb::arg("factors"),
            "Folds the same part of all ranks' data, `all` bytes each. Returns False if the core cannot.")
        .def(
            "reduce",
            [](Bound& w, const std::vector<std::pair<uintptr_t, size_t>>& shares, uintptr_t out,
               uint8_t dtype, int red, const std::vector<double>& factors, const std::vector<int>& to,
               const std::vector<int>& from, size_t chunk) {
                Reduction reduction{static_cast<DType>(dtype),
                                    static_cast<Red>(red),
                                    factors,
                                    {},
                                    memory(out),
                                    to,
                                    from,
                                    chunk};
                for (auto [data, bytes] : shares) reduction.shares.push_back({memory(data), bytes});
                if (int(shares.size()) != w.transport->size()) throw nb::value_error("a share for each rank");
                if (chunk == 0 || chunk % 16 != 0) throw nb::value_error("chunk is no multiple of 16");
                run(*w.transport, [&] { return reduce(*w.transport, reduction); });
            },
            nb::arg("shares"), nb::arg("out"), nb::arg("dtype"), nb::arg("red"), nb::arg("factors"),
            nb::arg("to"), nb::arg("from_"), nb::arg("chunk"),
            "Folds the shares of all ranks, and passes the result on to the ranks `to`.")
        .def(
            "broadcast",
            [](Bound& w, uintptr_t data, size_t bytes, int root, size_t chunk) {
                if (chunk == 0) throw nb::value_error("chunk is 0");
                run(*w.transport, [&] { return broadcast(*w.transport, memory(data), bytes, root, chunk); });
            },
            nb::arg("data"), nb::arg("bytes"), nb::arg("root"), nb::arg("chunk"));
}

}  // namespace

void bind_transport(nb::module_& m) {
    nb::exception<Failure>(m, "TransportFailure", PyExc_RuntimeError);
    bind_bound(m);
    nb::class_<SupervisedOperations, FastOperations>(m, "SupervisedOperations",
                                                     "Operations that the general path runs as well.")
        .def("run", &run_general, nb::arg("op"), nb::arg("dtype"), nb::arg("red"), nb::arg("root"),
             nb::arg("count"), nb::arg("extra"), nb::arg("timeout"), nb::arg("input").none(),
             nb::arg("output").none(), "Runs a collective on the general path. Returns None, or a fault.")
        .def("wait_idle", &SupervisedOperations::wait_idle, nb::call_guard<nb::gil_scoped_release>(),
             "Waits until no operation runs.");
    nb::class_<Fast, SupervisedOperations>(m, "TransportOperations");
    nb::class_<BoundFast, Fast>(m, "TransportFast", "Operations of a transport, for a fast path.")
        .def(nb::init<nb::object, bool, nb::object, nb::handle>(), nb::arg("transport"), nb::arg("compares"),
             nb::arg("counts"), nb::arg("supervisor"),
             nb::sig("def __init__(self, transport: Transport, compares: bool, counts: Counts, "
                     "supervisor: object) -> None"),
             "`supervisor` is held weakly.")
        .def(
            "fits", [](BoundFast& f, uint32_t op, size_t bytes) { return f.fits(OpCode(op), bytes); },
            nb::arg("op"), nb::arg("bytes"), "Whether `run` takes a collective with so many bytes of input.")
        .def("hear", &BoundFast::hear, nb::arg("connections"),
             "Takes the descriptors of the connections on which other ranks tell of faults.")
        .def("close", &BoundFast::close, "It takes no operation any more.")
        .def_rw("moment", &BoundFast::moment, "Seconds in which an operation needs no supervision.")
        .def_prop_ro("awaited", &BoundFast::awaited,
                     "The messages of the last exchange: peer, whether it is a send, number, bytes.");
    nb::class_<BoundMessages>(m, "TransportMessages", "Messages of a transport that complete one by one.")
        .def(nb::init<const Bound&>(), nb::arg("transport"))
        .def(
            "add",
            [](BoundMessages& x, int number, bool send, int peer, uintptr_t data, size_t bytes,
               uint32_t tag) {
                if (x.transport->stopped()) throw Failure("the communicator has ended");
                x.messages.add(number, send, peer, memory(data), bytes, tag);
            },
            nb::arg("number"), nb::arg("send"), nb::arg("peer"), nb::arg("data"), nb::arg("bytes"),
            nb::arg("tag"))
        .def("wait", &BoundMessages::wait, nb::arg("limit"), nb::arg("all"),
             "Waits up to `limit` seconds. Returns (number, peer, bytes) of those that are over; None if the "
             "transport was stopped, or not `all` came in time.");
}

}  // namespace unicomm
