// Bindings of the shared-memory transport. Tensors arrive validated; the GIL is released while an operation
// waits.
#include "base/bind.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "base/bind_fault.hpp"
#include "shm/dispatch.hpp"
#include "shm/memory/heap.hpp"
#include "shm/memory/peer_memory.hpp"
#include "shm/p2p.hpp"

namespace unicomm {
namespace {

using shm::Buffer;
using shm::buffer_of;
using shm::cuts_input;
using shm::cuts_output;
using shm::dispatch;
using shm::equal_parts;
using shm::Exchange;
using shm::Group;
using shm::Heap;
using shm::Message;
using shm::Op;
using shm::Segment;

std::vector<Tensor> read_all(nb::list tensors) {
    std::vector<Tensor> out(tensors.size());
    for (size_t i = 0; i < out.size(); ++i) {
        if (!read_tensor(tensors[i].ptr(), out[i])) throw nb::python_error();
    }
    return out;
}

// The part of each rank: one tensor each, or one tensor cut by rows or into equal parts.
std::vector<Buffer> buffers_of(const std::vector<Tensor>& tensors, nb::handle splits, int world) {
    std::vector<Buffer> out;
    if (tensors.size() != 1 || (world == 1 && splits.is_none())) {
        for (const Tensor& t : tensors) out.push_back(buffer_of(t));
        return out;
    }
    const Tensor& t = tensors[0];
    if (splits.is_none()) return equal_parts(t, world);
    char* at = static_cast<char*>(t.data);
    uint64_t rows = 0;  // the splits have them all; shapes of several tensors may share their memory
    for (nb::handle h : splits) rows += nb::cast<uint64_t>(h);
    uint64_t row = rows ? static_cast<uint64_t>(t.bytes) / rows : 0;
    for (nb::handle h : splits) {
        uint64_t bytes = nb::cast<uint64_t>(h) * row;
        out.push_back({at, bytes});
        at += bytes;
    }
    return out;
}

nb::object run(Group& g, uint32_t code, int dtype, int red, double factor, int root, uint64_t count,
               uint64_t extra, double timeout, nb::list inputs, nb::list outputs, nb::object in_splits,
               nb::object out_splits) {
    Op op = shm::op_of(code, dtype, red, root, count, extra, timeout);
    op.factor = factor;
    auto in_tensors = read_all(inputs), out_tensors = read_all(outputs);
    auto oc = static_cast<OpCode>(code);
    auto ins = buffers_of(in_tensors, in_splits, cuts_input(oc) ? g.world() : 1);
    auto outs = buffers_of(out_tensors, out_splits, cuts_output(oc) ? g.world() : 1);
    uint64_t elements = in_tensors.empty() ? 0 : static_cast<uint64_t>(in_tensors[0].numel);
    Fault fault;
    {
        GilReleased release;
        std::lock_guard lock(g.running());
        fault = dispatch(g, op, ins, outs, elements);
    }
    return fault_tuple(fault);
}

// `messages`: a list of (is_send, peer, tensor, tag).
std::vector<Message> read_messages(nb::list messages) {
    std::vector<Message> list;
    for (nb::handle h : messages) {
        auto item = nb::cast<nb::tuple>(h);
        Tensor t;
        if (!read_tensor(item[2].ptr(), t)) throw nb::python_error();
        list.push_back({nb::cast<bool>(item[0]), nb::cast<int>(item[1]), buffer_of(t), t.dtype,
                        static_cast<uint64_t>(t.numel), nb::cast<uint32_t>(item[3])});
    }
    return list;
}

bool ask(nb::handle look, uint64_t comm, int rank, const std::vector<uint64_t>& threads,
         std::vector<uint64_t>& matter) {
    try {
        nb::object answer = look(comm, rank, threads);
        if (answer.is_none()) return false;
        matter = nb::cast<std::vector<uint64_t>>(answer);
        return true;
    } catch (nb::python_error& error) {
        if (error.matches(PyExc_Exception)) {
            error.discard_as_unraisable("unicomm's look at the threads");
        } else {
            error.restore();
            keep_raised();
        }
    } catch (const std::exception&) {
    }
    return false;
}

// `look(comm, rank, threads)` returns the threads that matter, or None if another thread may enter (see
// waiting/deadlock.hpp). Any waiting thread calls it, while the interpreter lives.
void set_thread_check(nb::object look) {
    static nb::object* kept = nullptr;  // never destroyed: threads may wait until the process has ended
    if (!kept) kept = new nb::object();
    *kept = std::move(look);
    shm::set_thread_check(
        [](uint64_t comm, int rank, const std::vector<uint64_t>& threads, std::vector<uint64_t>& matter) {
            if (!Py_IsInitialized()) return false;
            PyGILState_STATE lock;
            with_end_of_python([&] { lock = PyGILState_Ensure(); });
            bool bound = false;
            with_end_of_python([&] { bound = ask(*kept, comm, rank, threads, matter); });
            PyGILState_Release(lock);
            return bound;
        });
}

nb::object exchange(Group& g, nb::list messages, double timeout) {
    std::vector<Message> list = read_messages(messages);
    uint64_t deadline = deadline_after(timeout);
    Fault fault;
    {
        GilReleased release;
        std::lock_guard lock(g.running());
        fault = g.exchange(list, deadline);
    }
    return fault_tuple(fault);
}

// Runs until the first event. Returns a fault, or a list of (index, peer, fault).
nb::object run_exchange(Exchange& e, Group& g, double timeout, double limit) {
    uint64_t deadline = deadline_after(timeout), back = deadline_after(limit);
    std::vector<Exchange::Done> done;
    Fault fault;
    {
        GilReleased release;
        std::lock_guard lock(g.running());
        fault = e.run(deadline, back, done);
    }
    if (fault) return fault_tuple(fault);
    nb::list out;
    for (const Exchange::Done& d : done) out.append(nb::make_tuple(d.index, d.peer, fault_tuple(d.fault)));
    return out;
}

}  // namespace

void bind_shm(nb::module_& m) {
    nb::class_<Segment>(m, "ShmSegment")
        .def(nb::init<int, uint32_t, uint32_t>(), nb::arg("world"), nb::arg("slot_bytes"),
             nb::arg("p2p_bytes"))
        .def_static(
            "open", [](int pid, int fd) { return std::make_shared<Segment>(pid, fd); }, nb::arg("pid"),
            nb::arg("fd"), "Maps the segment that process `pid` holds as descriptor `fd`.")
        .def("close_fd", &Segment::close_fd, "To be called once all ranks have mapped it.")
        .def_prop_ro("fd", &Segment::fd)
        .def_prop_ro("bytes", [](Segment& s) { return s.layout().bytes; });
    nb::class_<FastOperations>(m, "FastOperations", "What runs the operations of a fast path.");
    nb::class_<Group, FastOperations>(m, "ShmGroup")
        .def(
            "__init__",
            [](Group* self, std::shared_ptr<Segment> segment, int rank, const std::vector<int>& pids,
               const std::string& name) { new (self) Group(std::move(segment), rank, pids, name); },
            nb::arg("segment"), nb::arg("rank"), nb::arg("pids"), nb::arg("name") = "")
        .def("run", &run, nb::arg("code"), nb::arg("dtype"), nb::arg("red"), nb::arg("factor"),
             nb::arg("root"), nb::arg("count"), nb::arg("extra"), nb::arg("timeout"), nb::arg("inputs"),
             nb::arg("outputs"), nb::arg("in_splits").none(), nb::arg("out_splits").none(),
             nb::sig("def run(self, code: int, dtype: int, red: int, factor: float, root: int, count: int, "
                     "extra: int, timeout: float, inputs: list[Tensor], outputs: list[Tensor], "
                     "in_splits: list[int] | None, out_splits: list[int] | None) -> Fault | None"),
             "Runs a collective.")
        .def("exchange", &exchange, nb::arg("messages"), nb::arg("timeout"),
             nb::sig("def exchange(self, messages: list[Message], timeout: float) -> Fault | None"),
             "Runs all messages together; returns when all are done.")
        .def("offer_memory", &Group::offer_memory, nb::arg("proofs"), nb::arg("readers"),
             nb::sig(
                 "def offer_memory(self, proofs: Sequence[tuple[int, int]], readers: Sequence[int]) -> None"),
             "Has long messages read where they lie, by the ranks `readers`, which can read the memory of "
             "this one. `proofs`: of the processes of all ranks.")
        .def("abort", &Group::abort, nb::call_guard<GilReleased>())
        .def(
            "give_up",
            [](Group& g, int code, const std::vector<int>& culprits) {
                GilReleased release;
                g.give_up(FaultCode(code), culprits);
            },
            nb::arg("code"), nb::arg("culprits"), "Like `abort`, with the cause, which the other ranks get.")
        .def("expect_slow", &Group::expect_slow, nb::arg("seconds"),
             "Keeps operations of all ranks from timing out for that long.")
        .def("finalize", &Group::finalize)
        .def(
            "lost", [](Group& g, const std::vector<int>& ranks) { return fault_tuple(g.lost(ranks)); },
            nb::arg("ranks"), nb::sig("def lost(self, ranks: Sequence[int]) -> Fault | None"),
            "The fault if a rank has failed, or if one of these ranks has died.")
        .def("left", &Group::left, nb::arg("ranks"), "Those of these ranks that have finalized.")
        .def("dead_ranks", &Group::dead_ranks)
        .def("failed", [](Group& g) { return g.segment().header().failures.load() > 0; })
        .def_prop_ro("direct_operations", &Group::direct_operations)
        .def_prop_ro("id", [](Group& g) { return g.segment().id(); })
        .def_prop_ro("bytes", [](Group& g) { return g.segment().layout().bytes; });
    nb::class_<Exchange>(m, "ShmExchange")
        .def(nb::init<Group&>(), nb::arg("group"), nb::keep_alive<1, 2>())
        .def(
            "add",
            [](Exchange& e, nb::list messages) {
                std::vector<Message> list = read_messages(messages);
                // A message that another thread began before may still take its number.
                std::unique_lock running(e.running(), std::try_to_lock);
                if (!running) {
                    GilReleased release;
                    running.lock();
                }
                for (const Message& message : list) e.add(message);
            },
            nb::arg("messages"), nb::sig("def add(self, messages: list[Message]) -> None"))
        .def("run", &run_exchange, nb::arg("group"), nb::arg("timeout"), nb::arg("limit"),
             nb::sig("def run(self, group: ShmGroup, timeout: float, limit: float) -> "
                     "Fault | list[tuple[int, int, Fault | None]]"),
             "Returns at the first event: a fault of the group, or (index, peer, fault) of each message that "
             "is done.")
        .def("interrupt", &Exchange::interrupt)
        .def(
            "set_attended", &Exchange::set_attended, nb::arg("attended"),
            "Says whether a thread of the program waits for any of the messages. May be called at any time.");
    m.def(
        "heap_allocate",
        [](uint64_t bytes) {
            void* data = Heap::mine().allocate(bytes);
            nb::capsule owner(data, [](void* p) noexcept { Heap::release(p); });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {size_t(bytes)}, owner);
        },
        nb::arg("bytes"), nb::sig("def heap_allocate(bytes: int) -> NDArray[Any]"),
        "Memory that ranks of this host can read, as an array of bytes that owns it.");
    m.def(
        "heap_holds",
        [](uint64_t data, uint64_t bytes) { return Heap::holds(reinterpret_cast<const void*>(data), bytes); },
        nb::arg("data"), nb::arg("bytes"));
    m.def("heap_allocated", [] { return Heap::mine().allocated(); });
    m.def("set_thread_check", &set_thread_check, nb::arg("check"),
          nb::sig("def set_thread_check(check: Callable[[int, int, list[int]], list[int] | None]) -> None"),
          "`check(comm, rank, threads)` returns the waiting threads that matter, or None.");
    shm::set_signal_check(&signal_has_raised);
    m.def("usable_cores", &shm::usable_cores);
    m.def("proof_of_reading", &shm::proof_of_reading, nb::sig("def proof_of_reading() -> tuple[int, int]"),
          "A word of this process that nobody can guess: its address and value.");
    m.def("can_read", &shm::can_read, nb::arg("pid"), nb::arg("proof"),
          nb::sig("def can_read(pid: int, proof: tuple[int, int]) -> bool"),
          "Whether this process can read the memory of another one, which has this proof.");
    bind_fast(m);
    bind_short_methods(m);
    bind_single_messages(m);
    bind_all_reduce_method(m);
    bind_noted_property(m);
}

}  // namespace unicomm
