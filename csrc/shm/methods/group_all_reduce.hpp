// The fast path of `allreduce` of a torch.distributed process group. Its options are known from the note of
// what dist.all_reduce has just set, else they are read through their public getters.
#pragma once
#include <array>
#include <vector>

#include "base/bind.hpp"
#include "shm/methods/noted_property.hpp"

namespace unicomm {

// Reads torch's `AllreduceOptions`.
class AllReduceOptions {
  public:
    // `reductions`: torch's members of RedOpType -> unicomm's code, of those that the fast path takes.
    // `caller`: the code object of dist.all_reduce, if it never sets the timeout of its options and needs no
    // Work of a synchronous call; else None.
    // `modes`: torch's function that returns the number of dispatch modes of this thread.
    AllReduceOptions(nb::type_object type, nb::object reduction_hash, nb::object unset_timeout,
                     nb::object caller, nb::typed<nb::dict, nb::object, int> reductions, nb::object modes)
        : type_(type),
          async_(type.attr("asyncOp").attr("fget")),
          timeout_(type.attr("timeout").attr("fget")),
          reduction_(type.attr("reduceOp").attr("fget")),
          hash_(nb::getattr(reduction_hash, "__func__", reduction_hash)),  // without the method around it
          unset_timeout_(std::move(unset_timeout)),
          caller_(std::move(caller)),
          modes_(std::move(modes)) {
        for (auto [member, code] : reductions) {
            members_.push_back({nb::borrow(member), nb::cast<uint8_t>(code)});
            codes_.at(nb::cast<size_t>(nb::int_(member))) = members_.back().code;
        }
    }

    // Whether a dispatch mode listens to torch's operators, among which this operation then has to be.
    bool observed() const {
        nb::object number = nb::steal(PyObject_CallNoArgs(modes_.ptr()));
        if (!number.is_valid()) throw nb::python_error();
        return PyLong_AsLong(number.ptr()) != 0;
    }

    // Whether the options ask for a synchronous reduction without a timeout of its own; its code in `code`.
    // `by_torch`: whether dist.all_reduce is the caller.
    bool plain(nb::handle options, uint8_t& code, bool& by_torch) const {
        if (reinterpret_cast<PyObject*>(Py_TYPE(options.ptr())) != type_.ptr()) return false;
        by_torch = called_by_torch();
        if (by_torch && option_note.owner == options.ptr() && option_note.async_op == Py_False)
            for (const Member& known : members_)
                if (known.member.ptr() == option_note.reduction) {
                    code = known.code;
                    return true;
                }
        if (get(async_, options).ptr() != Py_False) return false;
        if (!by_torch) {
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
        nb::object found = nb::steal(call_one(getter.ptr(), options.ptr()));
        if (!found.is_valid()) throw nb::python_error();
        return found;
    }

    bool called_by_torch() const {
        PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
        if (!frame) return false;
        PyCodeObject* code = PyFrame_GetCode(frame);
        bool known = reinterpret_cast<PyObject*>(code) == caller_.ptr();
        Py_DECREF(code);
        Py_DECREF(frame);
        return known;
    }

    struct Member {
        nb::object member;
        uint8_t code;
    };

    nb::object type_, async_, timeout_, reduction_, hash_, unset_timeout_, caller_, modes_;
    std::array<uint8_t, 16> codes_{};  // by torch's number
    std::vector<Member> members_;
};

// The operation by the fast path of a communicator: True when it is done, None when it is done and
// dist.all_reduce called, which needs no Work; what a failed operation of the fast path returns; False,
// before anything was done, if the general path has to run it.
nb::object all_reduce_of_group(nb::handle fast_path, nb::handle tensors, nb::handle options,
                               const AllReduceOptions& reader);

}  // namespace unicomm
