// The native methods: they match the arguments and find the fast path of the communicator.
#include "shm/methods/short_methods.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "base/native_method.hpp"
#include "operations/opcode.hpp"

namespace unicomm {
namespace {

constexpr size_t kMostArguments = 8;

class ShortMethod : public NativeMethod {
  public:
    // `names`: of the parameters after the instance; the last ones have the `defaults`.
    ShortMethod(nb::object general, OpCode op, nb::tuple names, nb::tuple defaults)
        : general_(std::move(general)), op_(op), names_(std::move(names)), defaults_(std::move(defaults)) {
        if (names_.size() > kMostArguments || defaults_.size() > names_.size())
            throw nb::value_error("a method with more parameters than are known");
    }

    nb::object take(PyObject* const* args, size_t nargs, PyObject* keywords) override {
        std::array<PyObject*, kMostArguments> given{};
        if (!match(args, nargs, keywords, given)) return {};
        nb::object engine = attribute_of(args[0], engine_.ptr());
        nb::object fast = attribute_of(engine, fast_.ptr());
        nb::object result = call_fast(fast, op_, given.data());
        if (result.ptr() == Py_False) return {};
        if (!PyTuple_CheckExact(result.ptr())) return result;  // a Work
        PyObject* failed[] = {engine.ptr(), name_.ptr(), result.ptr()};
        result = nb::steal(PyObject_VectorcallMethod(failed_.ptr(), failed, 3, nullptr));
        if (!result.is_valid()) throw nb::python_error();
        return result;
    }

    PyObject* pass_on(PyObject* const* args, size_t nargsf, PyObject* names) override {
        return PyObject_Vectorcall(general_.ptr(), args, nargsf & ~PY_VECTORCALL_ARGUMENTS_OFFSET, names);
    }

    nb::handle looked_up() const override { return general_; }
    const char* name() const override { return name_of(op_); }

  private:
    // False if the method written in Python has to tell what is wrong with the arguments.
    bool match(PyObject* const* args, size_t nargs, PyObject* keywords,
               std::array<PyObject*, kMostArguments>& given) const {
        size_t all = size_t(tuple_size(names_.ptr()));
        if (nargs < 1 || nargs - 1 > all) return false;
        std::copy(args + 1, args + nargs, given.begin());
        for (Py_ssize_t i = 0; keywords && i < tuple_size(keywords); ++i) {
            size_t at = place_of(tuple_item(keywords, i));
            if (at >= all || given[at]) return false;
            given[at] = args[nargs + size_t(i)];
        }
        size_t first = all - size_t(tuple_size(defaults_.ptr()));
        for (size_t i = 0; i < all; ++i) {
            if (!given[i] && i < first) return false;
            if (!given[i]) given[i] = tuple_item(defaults_.ptr(), Py_ssize_t(i - first));
        }
        return true;
    }

    // The names of keywords in source code are interned, so their addresses tell which they are.
    size_t place_of(PyObject* keyword) const {
        size_t all = size_t(tuple_size(names_.ptr())), i = 0;
        while (i < all && tuple_item(names_.ptr(), Py_ssize_t(i)) != keyword) ++i;
        return i;
    }

    nb::object general_;
    OpCode op_;
    nb::tuple names_, defaults_;
    nb::str name_{name_of(op_)};
    nb::object engine_ = interned("_engine"), fast_ = interned("fast"), failed_ = interned("fast_failed");

    static nb::object interned(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }
};

}  // namespace

void bind_short_methods(nb::module_& m) {
    m.def(
        "short_method",
        [](nb::object general, uint32_t code, nb::typed<nb::tuple, nb::str, nb::ellipsis> names,
           nb::typed<nb::tuple, nb::object, nb::ellipsis> defaults) {
            if (code == 0 || code >= kOpCodes) throw nb::value_error("no operation has this code");
            return method_object(
                new ShortMethod(std::move(general), OpCode(code), std::move(names), std::move(defaults)));
        },
        nb::arg("general"), nb::arg("op"), nb::arg("names"), nb::arg("defaults"),
        "Returns a method of a communicator that tries its fast path, and calls `general` if that does not "
        "take the operation `op`.");
}

}  // namespace unicomm
