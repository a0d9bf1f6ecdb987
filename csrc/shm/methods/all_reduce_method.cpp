// `allreduce` of a process group as a native method: the fast path if it takes the call, else a method
// written in Python.
#include "base/native_method.hpp"
#include "shm/methods/group_all_reduce.hpp"

namespace unicomm {
namespace {

class AllReduceMethod : public NativeMethod {
  public:
    AllReduceMethod(AllReduceOptions options, nb::tuple path, nb::str general, nb::str failed,
                    nb::object done)
        : options_(std::move(options)),
          path_(std::move(path)),
          general_(std::move(general)),
          failed_(std::move(failed)),
          done_(std::move(done)) {}

    nb::object take(PyObject* const* args, size_t nargs, PyObject* names) override {
        if (nargs != 3 || names) return {};
        nb::object found = nb::borrow(args[0]);
        for (Py_ssize_t i = 0; i < tuple_size(path_.ptr()); ++i) {
            found = attribute_of(found, tuple_item(path_.ptr(), i));
            if (found.is_none()) return {};
        }
        nb::object result = all_reduce_of_group(found, args[1], args[2], options_);
        if (result.ptr() == Py_False) return {};
        if (result.is_none()) return result;
        if (result.ptr() == Py_True) return done_;
        result = nb::steal(call_method(args[0], failed_.ptr(), result.ptr()));
        if (!result.is_valid()) throw nb::python_error();
        return result;
    }

    PyObject* pass_on(PyObject* const* args, size_t nargsf, PyObject* names) override {
        return PyObject_VectorcallMethod(general_.ptr(), args, nargsf, names);
    }

    nb::handle looked_up() const override { return {}; }
    const char* name() const override { return "allreduce"; }

  private:
    AllReduceOptions options_;
    nb::tuple path_;            // names of the attributes from the group to the fast path
    nb::str general_, failed_;  // names of methods of the group
    nb::object done_;           // the Work of an operation that has completed
};

}  // namespace

void bind_all_reduce_method(nb::module_& m) {
    m.def(
        "all_reduce_method",
        [](nb::type_object options, nb::object reduction_hash, nb::object unset_timeout, nb::object caller,
           nb::typed<nb::dict, nb::object, int> reductions, nb::object modes,
           nb::typed<nb::tuple, nb::str, nb::ellipsis> path, nb::str general, nb::str failed,
           nb::object done) {
            AllReduceOptions reader(options, std::move(reduction_hash), std::move(unset_timeout),
                                    std::move(caller), reductions, std::move(modes));
            return method_object(new AllReduceMethod(std::move(reader), std::move(path), std::move(general),
                                                     std::move(failed), std::move(done)));
        },
        nb::arg("options"), nb::arg("reduction_hash"), nb::arg("unset_timeout"), nb::arg("caller").none(),
        nb::arg("reductions"), nb::arg("modes"), nb::arg("path"), nb::arg("general"), nb::arg("failed"),
        nb::arg("done"));
}

}  // namespace unicomm
