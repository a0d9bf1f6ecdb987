// The fast path of operations on symmetric memory: one native call from the Python function checks, records
// and runs. The general path is in unicomm/symm.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <mutex>

#include "base/bind.hpp"
#include "base/bind_fault.hpp"
#include "shm/dispatch.hpp"
#include "shm/fast_calls.hpp"
#include "symm/domain.hpp"
#include "symm/rows.hpp"

namespace unicomm {
namespace {

using namespace symm;

class SymmFast {
  public:
    SymmFast(nb::object calls, SymmDomainPtr end)
        : kept_(std::move(calls)), calls_(*nb::inst_ptr<FastCalls>(kept_)), end_(std::move(end)) {}

    // `align` None: one expert per rank, dense. Returns True if it has run, False if the general path has to,
    // else (fault, refusal).
    nb::object dispatch(uint32_t op, nb::handle input, nb::handle out, nb::handle splits, nb::handle results,
                        nb::handle align, nb::handle relaxed, nb::handle timeout) {
        Exchanged x;
        long rows = 0;
        if (!read(x, input, out, splits, results, relaxed, timeout) || x.splits.ndim != 1) return no();
        if (align.is_none()) {
            if (x.splits.numel != world()) return no();
        } else {
            if (!PyLong_CheckExact(align.ptr())) return no();
            rows = PyLong_AsLong(align.ptr());
            if (rows == -1 && PyErr_Occurred()) PyErr_Clear();
            if (rows < 1 || rows > kMostAlign) return no();
        }
        if (!fits(x.results, x.splits.numel)) return no();
        int experts = int(x.splits.numel / world());
        return run(op, x, [&](Composites& c, const Call& call, Refusal& refusal) {
            return c.dispatch(call, rows_of(x.in), rows_of(x.out), numbers_of(x.splits),
                              numbers_of(x.results), experts, rows, refusal);
        });
    }

    nb::object combine(uint32_t op, nb::handle input, nb::handle out, nb::handle splits, nb::handle results,
                       nb::handle relaxed, nb::handle timeout) {
        Exchanged x;
        if (!read(x, input, out, splits, results, relaxed, timeout)) return no();
        if (!fits(x.splits, x.results.numel / 2) || !fits(x.results, x.splits.numel / 2)) return no();
        int experts = int(x.results.shape[1] / world());
        return run(op, x, [&](Composites& c, const Call& call, Refusal& refusal) {
            return c.combine(call, rows_of(x.in), rows_of(x.out), numbers_of(x.splits), numbers_of(x.results),
                             experts, refusal);
        });
    }

    // Collectives of one tensor, or from one tensor to another. `red`: the name of the reduction.
    nb::object broadcast(uint32_t op, nb::handle tensor, nb::handle root, nb::handle relaxed,
                         nb::handle timeout) {
        Exchanged x;
        int64_t pe = 0;
        if (!plain(x, relaxed, timeout) || !symmetric(tensor, x.in) || !number(root, pe)) return no();
        if (pe < 0 || pe >= world()) return no();
        x.out = x.in;
        x.root = int(pe);
        return run(op, x, [&](Composites& c, const Call& call, Refusal&) {
            return c.broadcast(call, memory_of(x.in));
        });
    }

    nb::object all_to_all(uint32_t op, nb::handle input, nb::handle out, nb::handle relaxed,
                          nb::handle timeout) {
        Exchanged x;
        if (!plain(x, relaxed, timeout) || !symmetric(input, x.in) || !symmetric(out, x.out)) return no();
        if (!alike(x, 1) || x.in.numel % world()) return no();
        return run(op, x, [&](Composites& c, const Call& call, Refusal&) {
            return c.all_to_all(call, memory_of(x.in), static_cast<char*>(x.out.data));
        });
    }

    nb::object one_shot(uint32_t op, nb::handle input, nb::handle out, nb::handle red, nb::handle relaxed,
                        nb::handle timeout) {
        Exchanged x;
        if (!plain(x, relaxed, timeout) || !symmetric(input, x.in) || !calls_.read(out, x.out)) return no();
        if (!alike(x, 1) || !reduction(x, red)) return no();
        return run(op, x, [&](Composites& c, const Call& call, Refusal&) {
            return c.one_shot(call, memory_of(x.in), static_cast<char*>(x.out.data));
        });
    }

    nb::object two_shot(uint32_t op, nb::handle input, nb::handle red, nb::handle timeout) {
        Exchanged x;
        if (!plain(x, nb::handle(Py_False), timeout) || !symmetric(input, x.in) || !reduction(x, red))
            return no();
        x.out = x.in;
        return run(op, x, [&](Composites& c, const Call& call, Refusal&) {
            return c.two_shot(call, memory_of(x.in));
        });
    }

    // `last_dim`: parts of the last dimension, instead of the whole tensor.
    nb::object reduce_scatter(uint32_t op, nb::handle input, nb::handle out, nb::handle red,
                              nb::handle last_dim, nb::handle relaxed, nb::handle timeout) {
        Exchanged x;
        if (!plain(x, relaxed, timeout) || !symmetric(input, x.in) || !calls_.read(out, x.out)) return no();
        if (!PyBool_Check(last_dim.ptr()) || !alike(x, world()) || !reduction(x, red)) return no();
        bool split = last_dim.ptr() == Py_True && x.in.ndim;
        int64_t width = split ? x.in.shape[x.in.ndim - 1] : x.in.numel;
        if (width == 0 || width % world()) return no();
        return run(op, x, [&](Composites& c, const Call& call, Refusal&) {
            return c.reduce_scatter(call, memory_of(x.in), x.in.numel / width,
                                    static_cast<char*>(x.out.data));
        });
    }

    // Returns the list of received rows if it has run.
    nb::object all_to_all_v(uint32_t op, nb::handle input, nb::handle out, nb::handle splits,
                            nb::handle relaxed, nb::handle timeout) {
        Exchanged x;
        if (!plain(x, relaxed, timeout) || !read_rows(x, input, out)) return no();
        if (!PyList_CheckExact(splits.ptr()) || list_size(splits.ptr()) != world()) return no();
        int64_t left = x.in.shape[0];
        std::vector<int64_t> numbers, came(size_t(world()), 0);
        for (int i = 0; i < world(); ++i) {
            PyObject* item = list_item(splits.ptr(), i);
            if (!PyLong_CheckExact(item)) return no();
            int64_t n = PyLong_AsLongLong(item);
            if (n == -1 && PyErr_Occurred()) PyErr_Clear();
            if (n < 0 || n > left) return no();
            left -= n;
            numbers.push_back(n);
        }
        nb::object done = run(op, x, [&](Composites& c, const Call& call, Refusal& refusal) {
            return c.all_to_all_v(call, rows_of(x.in), rows_of(x.out), numbers.data(), came.data(), refusal);
        });
        return done.ptr() == Py_True ? nb::cast(came) : done;
    }

    // Operations of windows return a Work, False, or (fault, None). `tensor` is read from or written to
    // element `offset` of the `count` elements at `base` on `peer`.
    nb::object move(nb::handle name, uint32_t op, bool put, nb::handle tensor, nb::handle peer,
                    nb::handle offset, nb::handle async_op, nb::handle hints, nb::handle timeout,
                    Address base, int64_t count, int dtype) {
        Tensor t;
        int64_t at = 0, pe = 0;
        if (!calls_.plain(async_op, hints, timeout) || !number(peer, pe) || !number(offset, at)) return no();
        if (pe < 0 || pe >= world() || !calls_.read(tensor, t) || t.dtype != static_cast<DType>(dtype))
            return no();
        if (at < 0 || t.numel == 0 || at > count || t.numel > count - at) return no();
        auto bytes = uint64_t(t.bytes);
        void* there = unicomm::at<char>(base) + at * (t.bytes / t.numel);
        return one_sided(name, op, int(pe), put ? &t : nullptr, put ? nullptr : &t, [&](Error* error) {
            const Vtbl& table = end_->table();
            Domain domain = end_->domain();
            if (table.expect) table.expect(domain, bytes, error);
            int code = put ? table.put_nbi(domain, there, t.data, bytes, int(pe), nullptr, error)
                           : table.get_nbi(domain, t.data, there, bytes, int(pe), nullptr, error);
            return code ? code : table.quiet(domain, nullptr, error);
        });
    }

    // Adds 1 to the word on `peer`.
    nb::object signal(nb::handle name, uint32_t op, nb::handle peer, nb::handle async_op, nb::handle hints,
                      nb::handle timeout, Address word) {
        int64_t pe = 0;
        if (!end_->table().put_signal || !calls_.plain(async_op, hints, timeout) || !number(peer, pe))
            return no();
        if (pe < 0 || pe >= world()) return no();
        return one_sided(name, op, int(pe), nullptr, nullptr, [&](Error* error) {
            return end_->table().put_signal(end_->domain(), nullptr, nullptr, 0, unicomm::at<uint64_t>(word),
                                            1, SignalOp::kAdd, int(pe), nullptr, error);
        });
    }

    // Waits until the own word is at least `value`.
    nb::object wait_signal(nb::handle name, uint32_t op, nb::handle peer, nb::handle async_op,
                           nb::handle hints, nb::handle timeout, Address word, uint64_t value) {
        int64_t pe = 0;
        if (!end_->table().wait_signal || !calls_.plain(async_op, hints, timeout) || !number(peer, pe))
            return no();
        if (pe < 0 || pe >= world()) return no();
        uint64_t deadline = deadline_after(calls_.timeout);
        return one_sided(name, op, int(pe), nullptr, nullptr, [&](Error* error) {
            return end_->table().wait_signal(end_->domain(), unicomm::at<uint64_t>(word), Compare::kGe, value,
                                             int(pe), deadline, nullptr, error);
        });
    }

    // Atomic operations of windows: adds `first` to element `offset` of the `count` elements at `base` on
    // `peer`, or, with `swaps`, replaces it by `second` if it is `first`. Returns the old value, False, or
    // (fault, None).
    nb::object atomic(uint32_t op, bool swaps, nb::handle peer, nb::handle offset, nb::handle first,
                      nb::handle second, nb::handle timeout, Address base, int64_t count, int dtype) {
        int64_t pe = 0, at = 0;
        uint64_t value = 0, other = 0, before = 0;
        bool is_signed = static_cast<DType>(dtype) == DType::kInt64;
        const Vtbl& table = end_->table();
        if (swaps ? !table.compare_swap : !table.fetch_add) return no();
        if (calls_.blocked() || !timeout.is_none() || !number(peer, pe) || !number(offset, at)) return no();
        if (!is_signed && static_cast<DType>(dtype) != DType::kUInt64) return no();
        if (pe < 0 || pe >= world() || at < 0 || at >= count) return no();
        if (!word(first, value) || (swaps && !word(second, other))) return no();
        auto* target = unicomm::at<uint64_t>(base) + at;
        nb::object stopped = attempt(op, int(pe), nullptr, nullptr, [&](Error* error) {
            return swaps ? table.compare_swap(end_->domain(), target, value, other, int(pe), &before, nullptr,
                                              error)
                         : table.fetch_add(end_->domain(), target, value, int(pe), &before, nullptr, error);
        });
        if (stopped.is_valid()) return stopped;
        return is_signed ? nb::int_(int64_t(before)) : nb::int_(before);
    }

  private:
    static constexpr long kMostAlign = long{1} << 31;

    struct Exchanged {
        Tensor in, out, splits, results;
        bool relaxed = false;
        int root = -1;
        Red red{};
    };

    static nb::object no() { return nb::borrow(Py_False); }
    int world() { return end_->composites()->world(); }

    bool fits(const Tensor& numbers, int64_t count) {
        return numbers.ndim == 2 && numbers.shape[0] == 2 && numbers.shape[1] == count && count > 0 &&
               count % world() == 0;
    }

    bool symmetric(nb::handle object, Tensor& t) {
        return calls_.read(object, t) && end_->holds(Address(t.data), uint64_t(t.bytes));
    }

    bool plain(Exchanged& x, nb::handle relaxed, nb::handle timeout) {
        x.relaxed = relaxed.ptr() == Py_True;
        return !calls_.blocked() && timeout.is_none() && PyBool_Check(relaxed.ptr());
    }

    // Whether both have one dtype, do not overlap, and the input is `parts` times as large as the output.
    static bool alike(const Exchanged& x, int parts) {
        return x.in.dtype == x.out.dtype && x.in.numel == x.out.numel * parts &&
               !FastCalls::overlap(x.in, x.out);
    }

    // Finds the reduction of that name; unicomm/symm/exchange.py accepts more.
    bool reduction(Exchanged& x, nb::handle name) {
        static constexpr std::pair<const char*, Red> kNames[] = {
            {"sum", Red::kSum}, {"product", Red::kProduct}, {"min", Red::kMin}, {"max", Red::kMax}};
        if (!PyUnicode_CheckExact(name.ptr())) return false;
        for (auto [known, red] : kNames) {
            if (PyUnicode_CompareWithASCIIString(name.ptr(), known) == 0) {
                x.red = red;
                return fold_defined(x.in.dtype, red);
            }
        }
        return false;
    }

    bool read_rows(Exchanged& x, nb::handle input, nb::handle out) {
        if (!symmetric(input, x.in) || !symmetric(out, x.out)) return false;
        if (x.in.dtype != x.out.dtype || x.in.ndim != x.out.ndim || x.in.ndim < 1) return false;
        for (int i = 1; i < x.in.ndim; ++i) {
            if (x.in.shape[i] != x.out.shape[i]) return false;
        }
        return !FastCalls::overlap(x.in, x.out);
    }

    bool read(Exchanged& x, nb::handle input, nb::handle out, nb::handle splits, nb::handle results,
              nb::handle relaxed, nb::handle timeout) {
        if (!plain(x, relaxed, timeout) || !read_rows(x, input, out)) return false;
        if (!symmetric(splits, x.splits) || !symmetric(results, x.results)) return false;
        if (x.splits.dtype != DType::kInt64 || x.results.dtype != DType::kInt64) return false;
        const Tensor* all[] = {&x.in, &x.out, &x.splits, &x.results};
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < i; ++j) {
                if (FastCalls::overlap(*all[i], *all[j])) return false;
            }
        }
        return true;
    }

    static bool number(nb::handle object, int64_t& value) {
        if (!PyLong_CheckExact(object.ptr())) return false;
        value = PyLong_AsLongLong(object.ptr());
        if (value != -1 || !PyErr_Occurred()) return true;
        PyErr_Clear();
        return false;
    }

    // A number of 64 bits, with or without sign.
    static bool word(nb::handle object, uint64_t& value) {
        if (int64_t small = 0; number(object, small)) {
            value = uint64_t(small);
            return true;
        }
        if (!PyLong_CheckExact(object.ptr())) return false;
        value = PyLong_AsUnsignedLongLong(object.ptr());
        if (value != ~uint64_t{0} || !PyErr_Occurred()) return true;
        PyErr_Clear();
        return false;
    }

    template <class F>
    nb::object one_sided(nb::handle name, uint32_t op, int peer, const Tensor* in, const Tensor* out, F f) {
        nb::object stopped = attempt(op, peer, in, out, std::move(f));
        return stopped.is_valid() ? stopped : calls_.work(name, 0);
    }

    // Runs `f`. Returns False if the general path has to, (fault, None) if it failed, else an invalid object.
    template <class F>
    nb::object attempt(uint32_t op, int peer, const Tensor* in, const Tensor* out, F f) {
        std::unique_lock running(end_->running(), std::try_to_lock);
        if (!running || calls_.blocked()) return no();
        ring::NewRecord n = calls_.record_of(op, 0, peer);
        if (in) {
            n.n_in = 1;
            describe(*in, true, n.in_numel, n.in_dtype, n.in_ndim, n.in_dims);
        }
        if (out) {
            n.n_out = 1;
            describe(*out, true, n.out_numel, n.out_dtype, n.out_ndim, n.out_dims);
        }
        uint64_t record = calls_.begin(n);
        Error error{};
        int code;
        {
            FastCalls::Running now(calls_, op, 0);
            GilReleased release;
            code = f(&error);
        }
        calls_.writer().finish(record, code ? ring::State::kFailed : ring::State::kCompleted, uint32_t(code));
        if (code) return nb::make_tuple(calls_.failure(fault_of(code, error)), nb::none());
        raise_late_signals();
        return {};
    }

    template <class F>
    nb::object run(uint32_t op, const Exchanged& x, F f) {
        // Locked while the GIL is held, so that records follow the order of the operations.
        std::unique_lock running(end_->running(), std::try_to_lock);
        if (!running || calls_.blocked()) return no();
        Call call;
        call.op = op;
        call.dtype = x.in.dtype;
        call.red = x.red;
        call.root = x.root;
        call.relaxed = x.relaxed;
        call.deadline_ns = deadline_after(calls_.timeout);
        ring::NewRecord n = calls_.record_of(op, 0, -1);
        n.n_in = 1;
        n.n_out = x.results.numel ? 2 : 1;
        describe(x.in, true, n.in_numel, n.in_dtype, n.in_ndim, n.in_dims);
        describe(x.out, true, n.out_numel, n.out_dtype, n.out_ndim, n.out_dims);
        if (x.results.numel) describe(x.results, false, n.out_numel, n.out_dtype, n.out_ndim, n.out_dims);
        uint64_t record = calls_.begin(n);
        Fault fault;
        Refusal refusal;
        {
            FastCalls::Running now(calls_, op, 0);
            GilReleased release;
            fault = f(*end_->composites(), call, refusal);
        }
        bool good = !fault && !refusal.why;
        uint32_t code = refusal.why && !fault ? ring::kOtherError : uint32_t(fault.code);
        calls_.writer().finish(record, good ? ring::State::kCompleted : ring::State::kFailed, code);
        if (good) {
            raise_late_signals();
            return nb::borrow(Py_True);
        }
        return nb::make_tuple(calls_.failure(fault), refusal_tuple(refusal));
    }

    nb::object kept_;
    FastCalls& calls_;
    SymmDomainPtr end_;
};

}  // namespace

void bind_symm_fast(nb::module_& m) {
    constexpr auto any = [](const char* name) { return nb::arg(name).none(); };
    constexpr auto op = [] { return nb::arg("op"); };
    nb::class_<SymmFast>(m, "SymmFast",
                         "An operation on symmetric memory in one native call. Each returns False, before it "
                         "has done anything, if the general path has to run it.")
        .def(nb::init<nb::object, SymmDomainPtr>(), nb::arg("calls"), nb::arg("domain"),
             nb::sig("def __init__(self, calls: FastCalls, domain: SymmDomain) -> None"))
        .def("dispatch", &SymmFast::dispatch, op(), any("input"), any("out"), any("splits"), any("results"),
             any("align"), any("relaxed"), any("timeout"))
        .def("combine", &SymmFast::combine, op(), any("input"), any("out"), any("splits"), any("results"),
             any("relaxed"), any("timeout"))
        .def("move", &SymmFast::move, nb::arg("name"), op(), nb::arg("put"), any("tensor"), any("peer"),
             any("offset"), any("async_op"), any("hints"), any("timeout"), nb::arg("base"), nb::arg("count"),
             nb::arg("dtype"))
        .def("signal", &SymmFast::signal, nb::arg("name"), op(), any("peer"), any("async_op"), any("hints"),
             any("timeout"), nb::arg("word"))
        .def("wait_signal", &SymmFast::wait_signal, nb::arg("name"), op(), any("peer"), any("async_op"),
             any("hints"), any("timeout"), nb::arg("word"), nb::arg("value"))
        .def("atomic", &SymmFast::atomic, op(), nb::arg("swaps"), any("peer"), any("offset"), any("first"),
             any("second"), any("timeout"), nb::arg("base"), nb::arg("count"), nb::arg("dtype"))
        .def("broadcast", &SymmFast::broadcast, op(), any("tensor"), any("root"), any("relaxed"),
             any("timeout"))
        .def("all_to_all", &SymmFast::all_to_all, op(), any("input"), any("out"), any("relaxed"),
             any("timeout"))
        .def("one_shot", &SymmFast::one_shot, op(), any("input"), any("out"), any("red"), any("relaxed"),
             any("timeout"))
        .def("two_shot", &SymmFast::two_shot, op(), any("input"), any("red"), any("timeout"))
        .def("reduce_scatter", &SymmFast::reduce_scatter, op(), any("input"), any("out"), any("red"),
             any("last_dim"), any("relaxed"), any("timeout"))
        .def("all_to_all_v", &SymmFast::all_to_all_v, op(), any("input"), any("out"), any("splits"),
             any("relaxed"), any("timeout"));
}

}  // namespace unicomm
