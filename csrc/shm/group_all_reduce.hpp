// The options of `allreduce` of a torch.distributed process group, read through their public getters by the
// fast path.
#pragma once
#include <array>
#include <vector>

#include "base/bind.hpp"

namespace unicomm {

// Reads torch's `AllreduceOptions`.
class AllReduceOptions {
  public:
    // `codes`: unicomm's code for each of torch's reductions by number; 0: not for the fast path.
    // `sets_no_timeout`: the code object of a function that never sets the timeout of its options, or None.
    AllReduceOptions(nb::type_object type, nb::object reduction_hash, nb::object unset_timeout,
                     nb::object sets_no_timeout, nb::bytes codes)
        : type_(type),
          async_(type.attr("asyncOp").attr("fget")),
          timeout_(type.attr("timeout").attr("fget")),
          reduction_(type.attr("reduceOp").attr("fget")),
          hash_(nb::getattr(reduction_hash, "__func__", reduction_hash)),  // without the method around it
          unset_timeout_(std::move(unset_timeout)),
          sets_no_timeout_(std::move(sets_no_timeout)) {
        std::memcpy(codes_.data(), codes.c_str(), std::min(codes.size(), codes_.size()));
    }

    // Whether the options ask for a synchronous reduction without a timeout of its own; its code in `code`.
    bool plain(nb::handle options, uint8_t& code) const {
        if (reinterpret_cast<PyObject*>(Py_TYPE(options.ptr())) != type_.ptr()) return false;
        if (get(async_, options).ptr() != Py_False) return false;
        if (!caller_sets_no_timeout()) {
            int unset = PyObject_RichCompareBool(get(timeout_, options).ptr(), unset_timeout_.ptr(), Py_EQ);
            if (unset < 0) throw nb::python_error();
            if (!unset) return false;
        }
        nb::object number = get(hash_, get(reduction_, options));  // torch's number of the reduction
        size_t at = PyLong_AsSize_t(number.ptr());
        if (at >= codes_.size()) {
            PyErr_Clear();
            return false;
        }
        code = codes_[at];
        return code != 0;
    }

  private:
    static nb::object get(const nb::object& getter, nb::handle options) {
        nb::object found = nb::steal(PyObject_CallOneArg(getter.ptr(), options.ptr()));
        if (!found.is_valid()) throw nb::python_error();
        return found;
    }

    // Saves a getter for calls of dist.all_reduce.
    bool caller_sets_no_timeout() const {
        PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
        if (!frame) return false;
        PyCodeObject* code = PyFrame_GetCode(frame);
        bool known = reinterpret_cast<PyObject*>(code) == sets_no_timeout_.ptr();
        Py_DECREF(code);
        Py_DECREF(frame);
        return known;
    }

    nb::object type_, async_, timeout_, reduction_, hash_, unset_timeout_, sets_no_timeout_;
    std::array<uint8_t, 16> codes_{};
};

}  // namespace unicomm
