// Bindings of the UCX backend. Tensors come in as addresses and sizes, which are checked before.
#include "base/bind.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>

#include "base/bind_fault.hpp"
#include "base/clock.hpp"
#include "reduce/fold.hpp"
#include "shm/dispatch.hpp"
#include "ucx/collectives.hpp"
#include "ucx/fast.hpp"
#include "ucx/messages.hpp"
#include "ucx/sockets.hpp"

namespace unicomm {
namespace {

using namespace ucx;

char* memory(uintptr_t address) { return reinterpret_cast<char*>(address); }

// What an operation ended with that only ends done or by force.
void settle(Worker& worker, Ended ended) {
    if (ended == Ended::kSignal) {
        {
            GilReleased released;
            worker.drop();  // before the exception gives the tensors back to the program
        }
        fault_tuple(Fault{.code = FaultCode::kInternal, .culprits = {}, .claims = {}, .detail = {}});
    }
    if (ended != Ended::kDone) throw Failure("the communicator has ended");
    raise_late_signals();
}

template <class F>
void run(Worker& worker, F operation) {
    Ended ended;
    {
        GilReleased released;
        ended = operation();
    }
    settle(worker, ended);
}

// A worker with its slots.
struct UcxWorker {
    UcxWorker(std::shared_ptr<Library> library, int rank, int size, const Worker::Settings& settings,
              double spin)
        : worker(std::make_shared<Worker>(std::move(library), rank, size, settings, uint64_t(spin * 1e9))),
          slots(worker) {}
    std::shared_ptr<Worker> worker;
    Slots slots;

    bool gather(const nb::bytes& head, uintptr_t data, size_t bytes) {
        if (head.size() != Slots::kHead) throw nb::value_error("a head has 64 bytes");
        run(*worker, [&] { return slots.gather(head.c_str(), memory(data), bytes); });
        return slots.alike();
    }

    // `bytes` of a rank's data, which have to be `all`.
    const char* part(int rank, size_t bytes, size_t at, size_t all) const {
        if (slots.bytes(rank) != all) throw Failure("a slot of another size");
        if (bytes > all || at > all - bytes) throw nb::value_error("not a part of a slot");
        return slots.data(rank) + at;
    }
};

// `Fast` with what it uses.
struct UcxFast final : Fast {
    UcxFast(nb::object of, bool compares, nb::object counts, nb::handle supervisor)
        : Fast(nb::cast<UcxWorker&>(of).worker, compares ? &nb::cast<UcxWorker&>(of).slots : nullptr,
               std::move(counts), supervisor),
          worker(std::move(of)) {}
    nb::object worker;
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

struct UcxMessages {
    explicit UcxMessages(const UcxWorker& of) : worker(of.worker), messages(worker) {}
    std::shared_ptr<Worker> worker;
    Messages messages;

    // None if the worker was stopped, else the messages that are over.
    std::optional<std::vector<std::tuple<int, int, int64_t>>> wait(double limit, bool all) {
        Ended ended;
        {
            GilReleased released;
            ended = messages.wait(deadline_after(limit), all, !all);
        }
        if (ended == Ended::kStopped) return std::nullopt;
        if (ended == Ended::kSignal) settle(*worker, ended);
        if (ended == Ended::kLate && all) return std::nullopt;
        std::vector<std::tuple<int, int, int64_t>> found;
        for (const Finished& f : messages.take()) found.emplace_back(f.number, f.peer, int64_t(f.length));
        return found;
    }
};

void bind_worker(nb::module_& m) {
    m.def(
        "end_full_sockets",
        [](int epoll, double seconds) { return end_full_sockets(epoll, deadline_after(seconds)); },
        nb::arg("epoll"), nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>(),
        "Ends the sending side of the TCP sockets below an epoll file whose buffers stay full. Returns how "
        "many.");
    m.def("ucx_most_in_slot", &Slots::most, nb::arg("size"),
          "Bytes of a rank's data that travel with what it calls, if all of so many ranks need them.");
    nb::class_<UcxWorker>(m, "UcxWorker", "One communicator's worker of UCX.")
        .def(nb::init<std::shared_ptr<Library>, int, int, const Worker::Settings&, double>(),
             nb::arg("library"), nb::arg("rank"), nb::arg("size"), nb::arg("settings"), nb::arg("spin"),
             nb::call_guard<nb::gil_scoped_release>(),
             "`settings`: names without UCX_, values, and whether this UCX has to have them. `spin`: seconds "
             "that a wait polls "
             "before it sleeps.")
        .def_prop_ro(
            "address",
            [](UcxWorker& w) { return nb::bytes(w.worker->address().data(), w.worker->address().size()); })
        .def(
            "connect",
            [](UcxWorker& w, const std::vector<nb::bytes>& addresses) {
                std::vector<std::string> all;
                for (const nb::bytes& a : addresses) all.emplace_back(a.c_str(), a.size());
                GilReleased released;
                w.worker->connect(all);
            },
            nb::arg("addresses"), "Makes the endpoints to all workers, by the ranks' addresses.")
        .def(
            "greet",
            [](UcxWorker& w, double seconds) {
                Ended ended;
                {
                    GilReleased released;
                    ended = greet(*w.worker, deadline_after(seconds));
                }
                if (ended == Ended::kSignal) settle(*w.worker, ended);
                return ended == Ended::kDone;
            },
            nb::arg("seconds"), "Exchanges a message with every rank. Returns False when one did not come.")
        .def(
            "transports", [](UcxWorker& w, int peer) { return w.worker->transports(peer); }, nb::arg("peer"),
            "The ways to a peer, as transport/device; [] if this UCX does not tell.")
        .def(
            "stop", [](UcxWorker& w) { w.worker->stop(); }, "By any thread: ends all waits from now on.")
        .def(
            "rouse", [](UcxWorker& w) { w.worker->rouse(); }, "By any thread: ends a wait for messages.")
        .def(
            "flush",
            [](UcxWorker& w, double seconds) {
                GilReleased released;
                return w.worker->flush(deadline_after(seconds)) == Ended::kDone;
            },
            nb::arg("seconds"), "Waits until the system has all that was sent.")
        .def(
            "drop", [](UcxWorker& w) { return w.worker->drop(); }, nb::call_guard<nb::gil_scoped_release>(),
            "Ends the connections. Returns False if UCX may still touch the memory of messages.")
        .def(
            "forget", [](UcxWorker& w) { w.worker->forget(); }, "For a forked child: calls nothing of UCX.")
        .def("gather", &UcxWorker::gather, nb::arg("head"), nb::arg("data"), nb::arg("bytes"),
             "Exchanges slots with all ranks. Returns whether they call the same.")
        .def(
            "slot_head", [](UcxWorker& w, int rank) { return nb::bytes(w.slots.head(rank), Slots::kHead); },
            nb::arg("rank"))
        .def(
            "slot_data",
            [](UcxWorker& w, int rank) { return nb::bytes(w.slots.data(rank), w.slots.bytes(rank)); },
            nb::arg("rank"))
        .def(
            "take_slot",
            [](UcxWorker& w, int rank, uintptr_t to, size_t bytes, size_t at, size_t all) {
                std::memcpy(memory(to), w.part(rank, bytes, at, all), bytes);
            },
            nb::arg("rank"), nb::arg("to"), nb::arg("bytes"), nb::arg("at"), nb::arg("all"),
            "Copies a part of a rank's data, which are `all` bytes.")
        .def(
            "fold_slots",
            [](UcxWorker& w, uintptr_t to, size_t bytes, size_t at, size_t all, uint8_t dtype, int red,
               const std::vector<double>& factors) {
                const int size = w.worker->size();
                std::vector<const void*> sources;
                for (int rank = 0; rank < size; ++rank) sources.push_back(w.part(rank, bytes, at, all));
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
            [](UcxWorker& w, const std::vector<std::pair<uintptr_t, size_t>>& shares, uintptr_t out,
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
                if (int(shares.size()) != w.worker->size()) throw nb::value_error("a share for each rank");
                if (chunk == 0 || chunk % 16 != 0) throw nb::value_error("chunk is no multiple of 16");
                run(*w.worker, [&] { return reduce(*w.worker, reduction); });
            },
            nb::arg("shares"), nb::arg("out"), nb::arg("dtype"), nb::arg("red"), nb::arg("factors"),
            nb::arg("to"), nb::arg("from_"), nb::arg("chunk"),
            "Folds the shares of all ranks, and passes the result on to the ranks `to`.")
        .def(
            "broadcast",
            [](UcxWorker& w, uintptr_t data, size_t bytes, int root, size_t chunk) {
                if (chunk == 0) throw nb::value_error("chunk is 0");
                run(*w.worker, [&] { return broadcast(*w.worker, memory(data), bytes, root, chunk); });
            },
            nb::arg("data"), nb::arg("bytes"), nb::arg("root"), nb::arg("chunk"));
}

}  // namespace

void bind_ucx(nb::module_& m) {
    nb::exception<Failure>(m, "UcxFailure", PyExc_RuntimeError);
    nb::class_<Library>(m, "UcxLibrary", "An opened libucp.")
        .def(nb::init<const std::string&, bool>(), nb::arg("path"), nb::arg("loaded_only"),
             "Opens the library; raises OSError if it is none, or too old.")
        .def_prop_ro(
            "version",
            [](Library& l) { return std::make_tuple(l.version() / 100, l.version() % 100, l.release()); })
        .def_prop_ro("file", &Library::file)
        .def(
            "functions",
            [](const Library& l) {
                std::vector<std::tuple<std::string, int, bool>> found;
                for (const KnownFunction& k : l.known()) found.emplace_back(k.name, k.since, k.there);
                return found;
            },
            "Each function that may be used: name, since which version, whether the library has it.")
        .def(
            "set_log_level",
            [](Library& l, const std::string& level) {
                return l().ucs_global_opts_set_value("LOG_LEVEL", level.c_str()) == kOk;
            },
            nb::arg("level"),
            "Sets the level of UCX's own log, of this process. Returns False if it is none.");
    bind_worker(m);
    nb::class_<SupervisedOperations, FastOperations>(m, "SupervisedOperations",
                                                     "Operations that the general path runs as well.")
        .def("run", &run_general, nb::arg("op"), nb::arg("dtype"), nb::arg("red"), nb::arg("root"),
             nb::arg("count"), nb::arg("extra"), nb::arg("timeout"), nb::arg("input").none(),
             nb::arg("output").none(), "Runs a collective on the general path. Returns None, or a fault.")
        .def("wait_idle", &SupervisedOperations::wait_idle, nb::call_guard<nb::gil_scoped_release>(),
             "Waits until no operation runs.");
    nb::class_<Fast, SupervisedOperations>(m, "UcxOperations");
    nb::class_<UcxFast, Fast>(m, "UcxFast", "Small operations of a worker, for a fast path.")
        .def(nb::init<nb::object, bool, nb::object, nb::handle>(), nb::arg("worker"), nb::arg("compares"),
             nb::arg("counts"), nb::arg("supervisor"),
             nb::sig("def __init__(self, worker: UcxWorker, compares: bool, counts: Counts, supervisor: "
                     "object) -> "
                     "None"),
             "`supervisor` is held weakly.")
        .def(
            "fits", [](UcxFast& f, uint32_t op, size_t bytes) { return f.fits(OpCode(op), bytes); },
            nb::arg("op"), nb::arg("bytes"), "Whether `run` takes a collective with so many bytes of input.")
        .def("hear", &UcxFast::hear, nb::arg("connections"),
             "Takes the descriptors of the connections on which other ranks tell of faults.")
        .def("close", &UcxFast::close, "It takes no operation any more.")
        .def_rw("moment", &UcxFast::moment, "Seconds in which an operation needs no supervision.")
        .def_prop_ro("awaited", &UcxFast::awaited,
                     "The messages of the last exchange: peer, whether it is a send, number, bytes.");
    nb::class_<UcxMessages>(m, "UcxMessages", "Messages of a worker that complete one by one.")
        .def(nb::init<const UcxWorker&>(), nb::arg("worker"))
        .def(
            "add",
            [](UcxMessages& x, int number, bool send, int peer, uintptr_t data, size_t bytes, uint32_t tag) {
                if (x.worker->stopped()) throw Failure("the communicator has ended");
                x.messages.add(number, send, peer, memory(data), bytes, tag);
            },
            nb::arg("number"), nb::arg("send"), nb::arg("peer"), nb::arg("data"), nb::arg("bytes"),
            nb::arg("tag"))
        .def("wait", &UcxMessages::wait, nb::arg("limit"), nb::arg("all"),
             "Waits up to `limit` seconds. Returns (number, peer, bytes) of those that are over; None if the "
             "worker was stopped, or not `all` came in time.");
}

}  // namespace unicomm
