// The fast path: one native call from the Python method runs a small synchronous operation. It reads and
// checks the arguments, numbers and records the operation, and has the backend's `FastOperations` run it.
//
// The general path is in unicomm/comms/execution.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <mutex>
#include <vector>

#include "base/bind_fault.hpp"
#include "operations/opcode.hpp"
#include "recorder/recorder.hpp"
#include "shm/dispatch.hpp"
#include "shm/fast_calls.hpp"
#include "shm/fast_operations.hpp"
#include "shm/methods/group_all_reduce.hpp"
#include "shm/methods/short_methods.hpp"

namespace unicomm {
namespace {

using shm::Op;

constexpr int64_t kWithGil = 64 * 1024;  // bytes that are copied without releasing the GIL

class FastPath : public FastCalls {
  public:
    FastPath(nb::object backend, nb::object recorder, uint16_t comm, double timeout)
        : FastCalls(std::move(recorder), comm, timeout),
          backend_(std::move(backend)),
          b_(nb::cast<FastOperations&>(backend_)),
          pairs_(2 * size_t(b_.world())) {
        b_.recorded_in(&r_.writer, comm_);
    }

    ~FastPath() override { b_.recorded_in(nullptr, 0); }
    void give_up() override { b_.abort(); }
    void wake_waiting() override { b_.wake_me(); }
    nb::object backend() const { return backend_; }
    nb::object failed() const { return failed_; }
    uint64_t next_seq() { return ++seq_; }
    uint64_t seq() const { return seq_; }

    nb::object all_reduce(nb::handle tensor, nb::handle op, nb::handle async_op, nb::handle hints,
                          nb::handle timeout_arg) {
        Tensor t;
        uint8_t red = 0;
        if (!plain(async_op, hints, timeout_arg) || !read(tensor, true, t) || !reduction(op, t.dtype, red))
            return no();
        return run(OpCode::kAllReduce, static_cast<Red>(red), -1, t, t, t.numel, true, tensor, tensor);
    }

    // The arguments of a process group: `tensors` is a list. True when it is done, None when it is done and
    // dist.all_reduce called, which needs no Work.
    nb::object all_reduce_of_group(nb::handle tensors, nb::handle options, const AllReduceOptions& reader) {
        Tensor t;
        uint8_t red = 0;
        bool by_torch = false;
        if (!PyList_CheckExact(tensors.ptr()) || list_size(tensors.ptr()) != 1) return no();
        if (blocked() || reader.observed() || !reader.plain(options, red, by_torch)) return no();
        const nb::handle tensor = list_item(tensors.ptr(), 0);
        if (!read(tensor, t) || !fold_defined(t.dtype, static_cast<Red>(red))) return no();
        nb::object result =
            run(OpCode::kAllReduce, static_cast<Red>(red), -1, t, t, t.numel, false, tensor, tensor);
        return by_torch && result.ptr() == Py_True ? nb::none() : result;
    }

    nb::object broadcast(nb::handle tensor, nb::handle root, nb::handle async_op, nb::handle hints,
                         nb::handle timeout_arg) {
        Tensor t;
        if (!plain(async_op, hints, timeout_arg) || !read(tensor, true, t) || !PyLong_CheckExact(root.ptr()))
            return no();
        long r = PyLong_AsLong(root.ptr());
        if (r == -1 && PyErr_Occurred()) PyErr_Clear();
        if (r < 0 || r >= b_.world()) return no();
        return run(OpCode::kBroadcast, Red::kNone, static_cast<int>(r), t, t, t.numel, true, tensor, tensor);
    }

    nb::object barrier(nb::handle async_op, nb::handle hints, nb::handle timeout_arg) {
        if (!plain(async_op, hints, timeout_arg)) return no();
        Tensor none;
        return run(OpCode::kBarrier, Red::kNone, -1, none, none, 0);
    }

    nb::object all_gather_single(nb::handle output, nb::handle input, nb::handle async_op, nb::handle hints,
                                 nb::handle timeout_arg) {
        Tensor out, in;
        if (!plain(async_op, hints, timeout_arg) || !read(output, true, out) || !read(input, false, in))
            return no();
        if (in.dtype != out.dtype || out.numel != in.numel * b_.world() || overlap(in, out)) return no();
        return run(OpCode::kAllGatherSingle, Red::kNone, -1, in, out, in.numel, true, output, input);
    }

    nb::object reduce_scatter_single(nb::handle output, nb::handle input, nb::handle op, nb::handle async_op,
                                     nb::handle hints, nb::handle timeout_arg) {
        Tensor out, in;
        uint8_t red = 0;
        if (!plain(async_op, hints, timeout_arg) || !read(output, true, out) || !read(input, false, in))
            return no();
        if (!reduction(op, in.dtype, red)) return no();
        if (in.dtype != out.dtype || in.numel != out.numel * b_.world() || overlap(in, out)) return no();
        return run(OpCode::kReduceScatterSingle, static_cast<Red>(red), -1, in, out, out.numel, true, output,
                   input);
    }

    nb::object all_to_all_single(nb::handle output, nb::handle input, nb::handle async_op, nb::handle hints,
                                 nb::handle timeout_arg) {
        Tensor out, in;
        if (!plain(async_op, hints, timeout_arg) || !read(output, true, out) || !read(input, false, in))
            return no();
        if (in.dtype != out.dtype || in.numel != out.numel || in.numel % b_.world() || overlap(in, out))
            return no();
        return run(OpCode::kAllToAllSingle, Red::kNone, -1, in, out, in.numel, true, output, input);
    }

    nb::object send(nb::handle tensor, nb::handle dst, nb::handle async_op, nb::handle hints,
                    nb::handle timeout_arg) {
        return message(true, tensor, dst, async_op, hints, timeout_arg);
    }

    nb::object recv(nb::handle tensor, nb::handle src, nb::handle async_op, nb::handle hints,
                    nb::handle timeout_arg) {
        return message(false, tensor, src, async_op, hints, timeout_arg);
    }

    // `items`: a list of P2POp (unicomm/comms/batch.py).
    nb::object batch(nb::handle items, nb::handle async_op, nb::handle hints, nb::handle timeout_arg) {
        if (!plain(async_op, hints, timeout_arg) || !PyList_CheckExact(items.ptr())) return no();
        size_t count = size_t(list_size(items.ptr()));
        std::vector<Tensor> tensors(count);
        std::vector<shm::Message> messages;
        int others = 0;  // arrays
        for (size_t i = 0; i < count; ++i) {
            shm::Message m;
            nb::object value;
            if (!read_item(list_item(items.ptr(), Py_ssize_t(i)), m, tensors[i], value)) return no();
            if (!has_exchange_api(value.ptr()) && ++others > kShapes) return no();  // shapes would not last
            messages.push_back(m);
        }
        // What is received may not overlap anything else.
        for (size_t i = 0; i < count; ++i) {
            for (size_t j = 0; j < count && !messages[i].send; ++j) {
                if (i != j && overlap(tensors[i], tensors[j])) return no();
            }
        }
        std::unique_lock running(b_.running(), std::try_to_lock);
        if (!running || blocked() || count == 0 || !b_.begins(messages)) return no();
        std::vector<uint64_t> records;
        ring::NewRecord first, n;
        for (size_t i = 0; i < count; ++i) {
            const shm::Message& m = messages[i];
            n = record_of_message(m.send, tensors[i], next_pair_seq(m.peer, m.send), m.peer);
            if (i == 0) first = n;
            n.op_id = first.op_id;
            n.created_ns = first.created_ns;
            n.batch = first.op_id + 1;
            n.flags |= ring::kBatch;
            records.push_back(begin(n));
        }
        Fault fault;
        {
            Running now(*this, n.op, n.seq);
            GilReleased release;
            fault = b_.exchange(messages, deadline_after(timeout, first.created_ns));
        }
        auto state = fault ? ring::State::kFailed : ring::State::kCompleted;
        for (uint64_t record : records) r_.writer.finish(record, state, static_cast<uint32_t>(fault.code));
        if (fault) return failure_of(n.seq, fault, items);
        raise_late_signals();
        return FastCalls::work(batch_, n.seq);
    }

    // Messages are numbered per peer and direction, here for the general path, too.
    uint64_t pair_seq(int peer, bool send) { return pairs_[2 * size_t(peer) + send]; }
    uint64_t next_pair_seq(int peer, bool send) { return ++pairs_[2 * size_t(peer) + send]; }

  private:
    bool read_item(nb::handle item, shm::Message& m, Tensor& t, nb::object& value) {
        nb::object kind = nb::getattr(item, kind_, nb::none());
        value = nb::getattr(item, tensor_, nb::none());
        nb::object peer = nb::getattr(item, peer_, nb::none());
        if (!PyUnicode_CheckExact(kind.ptr()) || !PyLong_CheckExact(peer.ptr())) return false;
        m.send = kind.equal(send_);
        if (!m.send && !kind.equal(recv_)) return false;
        long to = PyLong_AsLong(peer.ptr());
        if (to == -1 && PyErr_Occurred()) PyErr_Clear();
        if (to < 0 || to >= b_.world() || to == b_.rank() || !read(value, !m.send, t)) return false;
        m.peer = int(to);
        m.buffer = shm::buffer_of(t);
        m.dtype = t.dtype;
        m.count = uint64_t(t.numel);
        return true;
    }

    nb::object message(bool send, nb::handle tensor, nb::handle peer_arg, nb::handle async_op,
                       nb::handle hints, nb::handle timeout_arg) {
        Tensor t;
        if (!plain(async_op, hints, timeout_arg) || !read(tensor, !send, t) ||
            !PyLong_CheckExact(peer_arg.ptr()))
            return no();
        long peer = PyLong_AsLong(peer_arg.ptr());
        if (peer == -1 && PyErr_Occurred()) PyErr_Clear();
        if (peer < 0 || peer >= b_.world() || peer == b_.rank()) return no();
        std::unique_lock running(b_.running(), std::try_to_lock);
        if (!running || blocked()) return no();
        single_[0] = {send, int(peer), shm::buffer_of(t), t.dtype, uint64_t(t.numel)};
        if (!b_.begins(single_)) return no();
        ring::NewRecord n = record_of_message(send, t, next_pair_seq(int(peer), send), int(peer));
        uint64_t deadline = deadline_after(timeout, n.created_ns);
        uint64_t record = 0;
        Running now(*this, n.op, n.seq);
        Fault fault = recorded(t.bytes, n, record, [&] { return b_.exchange(single_, deadline); });
        return finished(record, n, fault, true, tensor);
    }

    // `tensors`: what a failed message may still touch.
    nb::object failure_of(uint64_t seq, const Fault& fault, nb::handle tensors) {
        failed_ = nb::borrow(tensors);
        try {
            return nb::make_tuple(seq, fault_tuple(fault));
        } catch (nb::python_error&) {
            b_.interrupted();
            throw;
        }
    }

    nb::object finished(uint64_t record, const ring::NewRecord& n, const Fault& fault, bool as_work,
                        nb::handle tensors = nb::none()) {
        auto state = fault ? ring::State::kFailed : ring::State::kCompleted;
        r_.writer.finish(record, state, static_cast<uint32_t>(fault.code));
        if (fault) return failure_of(n.seq, fault, tensors);
        raise_late_signals();
        return as_work ? work(static_cast<OpCode>(n.op), n.seq) : nb::borrow(Py_True);
    }

    nb::object work(OpCode code, uint64_t seq) {
        nb::str& name = names_[size_t(code)];
        if (!name.is_valid()) name = nb::str(name_of(code));
        return FastCalls::work(name, seq);
    }

    // ReduceOp.SUM and the like are singletons, so their codes are cached by address.
    bool reduction(nb::handle op, DType dtype, uint8_t& red) {
        if (op.ptr() != op_.ptr()) {
            PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(op.ptr()));
            if (!reduce_op_type_.is_valid()) {
                reduce_op_type_ = nb::module_::import_("unicomm.comms.operations.reduction").attr("ReduceOp");
            }
            if (type != reduce_op_type_.ptr()) return false;
            op_ = nb::borrow(op);
            red_ = nb::cast<uint8_t>(op.attr("code"));
        }
        red = red_;
        auto r = static_cast<Red>(red);
        return r != Red::kPremulSum && fold_defined(dtype, r);
    }

    // `output`, `input`: a failed operation may still touch them.
    nb::object run(OpCode code, Red red, int root, const Tensor& in, const Tensor& out, int64_t count,
                   bool as_work = true, nb::handle output = nb::none(), nb::handle input = nb::none()) {
        // Locked before the sequence number is taken, while the GIL is held: numbers must follow the order of
        // the operations. If another thread's operation runs, the general path queues this one.
        std::unique_lock running(b_.running(), std::try_to_lock);
        if (!running || blocked()) return no();
        Op op;
        op.code = static_cast<uint32_t>(code);
        op.dtype = in.dtype;
        op.red = red;
        op.root = root;
        op.count = static_cast<uint64_t>(count);
        if (!b_.begins(op, in)) return no();

        ring::NewRecord n = record_of(uint32_t(code), next_seq(), root);
        op.deadline_ns = deadline_after(timeout, n.created_ns);
        n.red = static_cast<uint8_t>(red);
        bool tensors = code != OpCode::kBarrier;
        n.n_in = n.n_out = tensors;
        if (tensors) {
            describe(in, true, n.in_numel, n.in_dtype, n.in_ndim, n.in_dims);
            describe(out, true, n.out_numel, n.out_dtype, n.out_ndim, n.out_dims);
        }
        uint64_t record = 0;

        Fault fault;
        if (b_.world() == 1) {
            record = begin(n);
            fault = b_.collective(op, in, out);
        } else {
            fault = with_others(op, n, record, in, out);
        }
        if (!fault || fault.code == FaultCode::kMismatch) return finished(record, n, fault, as_work);
        return finished(record, n, fault, as_work, nb::make_tuple(output, input));
    }

    // Not inlined: a group of one rank, which keeps the GIL, would pay for it.
    [[gnu::noinline]] Fault with_others(const Op& op, ring::NewRecord& n, uint64_t& record, const Tensor& in,
                                        const Tensor& out) {
        Running now(*this, op.code, n.seq);
        return recorded(in.bytes, n, record, [&] { return b_.collective(op, in, out); });
    }

    // Runs an operation without the GIL, and records its beginning; a small one puts both off.
    template <class Operation>
    Fault recorded(int64_t bytes, ring::NewRecord& n, uint64_t& record, Operation operation) {
        if (b_.announces() && bytes <= kWithGil) {
            DeferredRecord deferred(r_, n);
            Fault fault = operation();
            record = deferred.id();
            return fault;
        }
        record = begin(n);
        GilReleased release;
        return operation();
    }

    nb::object backend_;  // keeps it alive
    FastOperations& b_;
    std::vector<shm::Message> single_ = std::vector<shm::Message>(1);  // guarded by `running`
    nb::object failed_ = nb::none();
    uint64_t seq_ = 0;             // guarded by the GIL
    std::vector<uint64_t> pairs_;  // guarded by the GIL
    nb::object op_, reduce_op_type_;
    nb::str names_[kOpCodes];
    nb::str batch_{"batch"}, kind_{"kind"}, tensor_{"tensor"}, peer_{"peer"}, send_{"send"}, recv_{"recv"};
    uint8_t red_ = 0;
};

PyTypeObject* fast_path_type = nullptr;

}  // namespace

nb::object all_reduce_of_group(nb::handle fast_path, nb::handle tensors, nb::handle options,
                               const AllReduceOptions& reader) {
    if (Py_TYPE(fast_path.ptr()) != fast_path_type) return nb::borrow(Py_False);
    return nb::inst_ptr<FastPath>(fast_path)->all_reduce_of_group(tensors, options, reader);
}

nb::object call_fast(nb::handle fast_path, OpCode op, PyObject* const* a) {
    if (Py_TYPE(fast_path.ptr()) != fast_path_type) return nb::borrow(Py_False);
    FastPath& f = *nb::inst_ptr<FastPath>(fast_path);
    switch (op) {
        case OpCode::kSend:
            return f.send(a[0], a[1], a[2], a[3], a[4]);
        case OpCode::kRecv:
            return f.recv(a[0], a[1], a[2], a[3], a[4]);
        case OpCode::kBroadcast:
            return f.broadcast(a[0], a[1], a[2], a[3], a[4]);
        case OpCode::kAllReduce:
            return f.all_reduce(a[0], a[1], a[2], a[3], a[4]);
        case OpCode::kAllGatherSingle:
            return f.all_gather_single(a[0], a[1], a[2], a[3], a[4]);
        case OpCode::kReduceScatterSingle:
            return f.reduce_scatter_single(a[0], a[1], a[2], a[3], a[4], a[5]);
        case OpCode::kAllToAllSingle:
            return f.all_to_all_single(a[0], a[1], a[2], a[3], a[4]);
        case OpCode::kBarrier:
            return f.barrier(a[0], a[1], a[2]);
        default:
            return nb::borrow(Py_False);
    }
}

void bind_fast(nb::module_& m) {
    nb::class_<FastCalls>(m, "FastCalls", "What native fast paths share: whether they may be used now.")
        .def("block", &FastCalls::block)
        .def("unblock", &FastCalls::unblock)
        .def("running", &FastCalls::running, nb::arg("here") = false,
             "The operations that run now, as (code, number); with `here` only those of this thread.")
        .def_rw("timeout", &FastCalls::timeout);
    constexpr auto any = [](const char* name) { return nb::arg(name).none(); };
    nb::class_<FastPath, FastCalls>(m, "FastPath",
                                    "Operations in one native call. Each returns False, before it has done "
                                    "anything, if the general path has to run it.")
        .def(nb::init<nb::object, nb::object, uint16_t, double>(), nb::arg("backend"), nb::arg("recorder"),
             nb::arg("comm"), nb::arg("timeout"),
             nb::sig("def __init__(self, backend: FastOperations, recorder: Recorder, comm: int, timeout: "
                     "float) -> None"))
        .def_prop_ro("backend", &FastPath::backend, nb::sig("def backend(self) -> FastOperations"))
        .def_prop_ro("failed", &FastPath::failed, nb::sig("def failed(self) -> object"),
                     "The tensors of the operation that failed, or None.")
        .def("next_seq", &FastPath::next_seq)
        .def_prop_ro("seq", &FastPath::seq)
        .def("all_reduce", &FastPath::all_reduce, any("tensor"), any("op"), any("async_op"), any("hints"),
             any("timeout"))
        .def("broadcast", &FastPath::broadcast, any("tensor"), any("root"), any("async_op"), any("hints"),
             any("timeout"))
        .def("barrier", &FastPath::barrier, any("async_op"), any("hints"), any("timeout"))
        .def("all_gather_single", &FastPath::all_gather_single, any("output"), any("input"), any("async_op"),
             any("hints"), any("timeout"))
        .def("reduce_scatter_single", &FastPath::reduce_scatter_single, any("output"), any("input"),
             any("op"), any("async_op"), any("hints"), any("timeout"))
        .def("all_to_all_single", &FastPath::all_to_all_single, any("output"), any("input"), any("async_op"),
             any("hints"), any("timeout"))
        .def("send", &FastPath::send, any("tensor"), any("dst"), any("async_op"), any("hints"),
             any("timeout"))
        .def("recv", &FastPath::recv, any("tensor"), any("src"), any("async_op"), any("hints"),
             any("timeout"))
        .def("batch", &FastPath::batch, any("items"), any("async_op"), any("hints"), any("timeout"))
        .def("pair_seq", &FastPath::pair_seq, nb::sig("def pair_seq(self, peer: int, send: bool, /) -> int"))
        .def("next_pair_seq", &FastPath::next_pair_seq,
             nb::sig("def next_pair_seq(self, peer: int, send: bool, /) -> int"));
    fast_path_type = reinterpret_cast<PyTypeObject*>(m.attr("FastPath").ptr());
}

}  // namespace unicomm
