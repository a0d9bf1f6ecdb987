// Reads tensors through DLPack, or through their methods.
#include "operations/tensor.hpp"

#include "portable/python.hpp"

namespace unicomm {
namespace {

// The parts of DLPack 1.x that are read here (https://dmlc.github.io/dlpack/latest/c_api.html).
struct DLDevice {
    int32_t type, id;
};
struct DLDataType {
    uint8_t code, bits;
    uint16_t lanes;
};
struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct ExchangeHeader {
    uint32_t major, minor;
    ExchangeHeader* previous;
};
struct ExchangeAPI {
    ExchangeHeader header;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*dltensor_from_object)(void* object, DLTensor* out);
    void* current_stream;
};

struct CachedType {
    PyTypeObject* type = nullptr;
    const ExchangeAPI* api = nullptr;
};
thread_local CachedType cached;

DType dtype_of(const DLDataType& t) {
    if (t.lanes == 2 && t.code == 17 && t.bits == 4) return DType::kFloat4E2M1FNX2;
    if (t.lanes != 1) return DType::kOther;
    switch (t.code * 256 + t.bits) {
        case 0 * 256 + 8:
            return DType::kInt8;
        case 0 * 256 + 16:
            return DType::kInt16;
        case 0 * 256 + 32:
            return DType::kInt32;
        case 0 * 256 + 64:
            return DType::kInt64;
        case 1 * 256 + 8:
            return DType::kUInt8;
        case 1 * 256 + 16:
            return DType::kUInt16;
        case 1 * 256 + 32:
            return DType::kUInt32;
        case 1 * 256 + 64:
            return DType::kUInt64;
        case 2 * 256 + 16:
            return DType::kFloat16;
        case 2 * 256 + 32:
            return DType::kFloat32;
        case 2 * 256 + 64:
            return DType::kFloat64;
        case 4 * 256 + 16:
            return DType::kBFloat16;
        case 5 * 256 + 64:
            return DType::kComplex64;
        case 5 * 256 + 128:
            return DType::kComplex128;
        case 6 * 256 + 8:
            return DType::kBool;
        case 10 * 256 + 8:
            return DType::kFloat8E4M3;
        case 12 * 256 + 8:
            return DType::kFloat8E5M2;
        case 11 * 256 + 8:
            return DType::kFloat8E4M3FNUZ;
        case 13 * 256 + 8:
            return DType::kFloat8E5M2FNUZ;
        case 14 * 256 + 8:
            return DType::kFloat8E8M0FNU;
        default:
            return DType::kOther;
    }
}

const ExchangeAPI* exchange_api(PyTypeObject* type) {
    if (cached.type == type) return cached.api;
    const ExchangeAPI* api = nullptr;
    PyObject* capsule =
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    if (capsule) {
        auto* header = static_cast<ExchangeHeader*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
        while (header && header->major > 1) header = header->previous;
        if (header && header->major == 1) api = reinterpret_cast<const ExchangeAPI*>(header);
        if (api && !api->dltensor_from_object) api = nullptr;
        Py_DECREF(capsule);
    }
    PyErr_Clear();
    // A reference keeps the cached type alive, so that no other type gets its address.
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    Py_XDECREF(reinterpret_cast<PyObject*>(cached.type));
    cached = {type, api};
    return api;
}

bool is_contiguous(const DLTensor& t) {
    if (!t.strides) return true;
    int64_t expected = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
        if (t.shape[i] == 0) return true;
        if (t.shape[i] != 1 && t.strides[i] != expected) return false;
        expected *= t.shape[i];
    }
    return true;
}

// Without the exchange API: unicomm.comms.operations.dtypes.describe returns (data_ptr, dtype code, bytes of
// an element, contiguous, DLPack device type, shape).
thread_local int64_t fallback_shapes[kShapes][64];
thread_local int last_shape = 0;

bool read_by_methods(PyObject* object, Tensor& out) {
    static PyObject* describe = nullptr;
    if (!describe) {
        PyObject* module = PyImport_ImportModule("unicomm.comms.operations.dtypes");
        if (!module) return false;
        describe = PyObject_GetAttrString(module, "describe");
        Py_DECREF(module);
        if (!describe) return false;
    }
    PyObject* tuple = call_one(describe, object);
    if (!tuple) return false;
    unsigned long long data = 0;
    int dtype = 0, element = 0, contiguous = 0, device = 0;
    PyObject* shape = nullptr;
    bool ok = PyArg_ParseTuple(tuple, "KiipiO!", &data, &dtype, &element, &contiguous, &device, &PyTuple_Type,
                               &shape);
    if (ok) {
        out.data = reinterpret_cast<void*>(data);
        out.dtype = static_cast<DType>(dtype);
        out.contiguous = contiguous != 0;
        out.device_type = device;
        out.ndim = static_cast<int32_t>(tuple_size(shape) < 64 ? tuple_size(shape) : 64);
        out.numel = 1;
        int64_t* own = fallback_shapes[last_shape = (last_shape + 1) % kShapes];
        for (int i = 0; i < out.ndim; ++i) {
            own[i] = PyLong_AsLongLong(tuple_item(shape, i));
            out.numel *= own[i];
        }
        out.shape = own;
        out.bytes = out.numel * element;
    }
    Py_DECREF(tuple);
    return ok && !PyErr_Occurred();
}

}  // namespace

bool has_exchange_api(PyObject* object) { return exchange_api(Py_TYPE(object)) != nullptr; }

bool read_tensor(PyObject* object, Tensor& out) {
    const ExchangeAPI* api = exchange_api(Py_TYPE(object));
    if (!api) return read_by_methods(object, out);
    DLTensor t;
    if (api->dltensor_from_object(object, &t) != 0) {
        PyErr_Clear();
        return read_by_methods(object, out);
    }
    out.data = static_cast<char*>(t.data) + t.byte_offset;
    out.ndim = t.ndim;
    out.shape = t.shape;
    out.numel = 1;
    for (int i = 0; i < t.ndim; ++i) out.numel *= t.shape[i];
    out.bytes = out.numel * ((t.dtype.bits * t.dtype.lanes + 7) / 8);
    out.dtype = dtype_of(t.dtype);
    out.device_type = t.device.type;
    out.contiguous = is_contiguous(t);
    return true;
}

}  // namespace unicomm
