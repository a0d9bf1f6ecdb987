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
    AllReduceOptions(nb::type_object type, nb::object unset_timeout, nb::bytes codes)
        : type_(reinterpret_cast<PyTypeObject*>(type.ptr())),
          keep_(type),
          async_(type.attr("asyncOp").attr("fget")),
          timeout_(type.attr("timeout").attr("fget")),
          reduction_(type.attr("reduceOp").attr("fget")),
          unset_timeout_(std::move(unset_timeout)) {
        std::memcpy(codes_.data(), codes.c_str(), std::min(codes.size(), codes_.size()));
    }

    // Whether the options ask for a synchronous reduction without a timeout of its own; its code in `code`.
    bool plain(nb::handle options, uint8_t& code) const {
        if (Py_TYPE(options.ptr()) != type_) return false;
        if (get(async_, options).ptr() != Py_False) return false;
        int unset = PyObject_RichCompareBool(get(timeout_, options).ptr(), unset_timeout_.ptr(), Py_EQ);
        if (unset < 0) throw nb::python_error();
        if (!unset) return false;
        Py_hash_t number = PyObject_Hash(get(reduction_, options).ptr());  // torch's number of the reduction
        if (number == -1) throw nb::python_error();
        if (number < 0 || number >= Py_hash_t(codes_.size())) return false;
        code = codes_[size_t(number)];
        return code != 0;
    }

  private:
    static nb::object get(const nb::object& getter, nb::handle options) {
        nb::object found = nb::steal(PyObject_CallOneArg(getter.ptr(), options.ptr()));
        if (!found.is_valid()) throw nb::python_error();
        return found;
    }

    PyTypeObject* type_;
    nb::object keep_, async_, timeout_, reduction_, unset_timeout_;
    std::array<uint8_t, 16> codes_{};
};

}  // namespace unicomm
