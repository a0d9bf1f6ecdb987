// A double of the CUDA runtime over host memory, for tests of csrc/symm/tables/cuda_ipc.cpp where there is no GPU.
// It is no emulator: it has the functions that are called there, with their signatures, and is strict about
// what the real one leaves undefined.
//
// With `double_use_streams` its streams are those of the other double, tests/nccl_double, where kernels run
// too. The default one is then the host's: what is put there is done when the call returns.
//
// As in the real one each thread has a current device and keeps its last error until it asks for it, and who
// allocates, gives back, opens or closes memory while a graph is captured, be it in another thread, ends the
// capture unless its mode is relaxed. Stricter than that, memory is given back and closed where the current
// device is that of the memory.
//
// Memory is a memfd with a page before it that counts who has it open. Copies wait until their stream is
// synchronised. Opening a handle in the process that made it fails, as with the real one; giving memory back
// that another process has open ends the process.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr size_t kPage = 4096;
constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidContext = 201,
              kInvalidHandle = 400, kPeerAccessAlreadyEnabled = 704, kCaptureUnsupported = 900;
constexpr int kDevices = 2, kRelaxed = 2;

struct Handle {
    int pid, fd;
    size_t bytes;
    char rest[48];
};
static_assert(sizeof(Handle) == 64);

struct Piece {
    char* whole;
    size_t bytes;
    int fd;  // -1: opened by its handle
    int device;
};
struct Copy {
    void* to;
    const void* from;
    size_t bytes;
};
std::mutex mutex;
std::map<void*, Piece> pieces;
std::map<void*, std::vector<Copy>> pending;  // by stream
int (*stream_copy)(void* stream, void* to, const void* from, size_t bytes) = nullptr;
int (*stream_synchronize)(void* stream) = nullptr;
thread_local int device = 0, last_error = 0, capture_mode = 0;
std::atomic<bool> capturing{false};
std::atomic<int> failing{0};

int noted(int result) {
    if (result != 0) last_error = result;
    return result;
}

// What a call about memory does to captures: 0, or its error.
int about_memory() {
    if (!capturing || capture_mode == kRelaxed) return 0;
    capturing = false;
    return kCaptureUnsupported;
}

std::atomic<int>& opens(const Piece& piece) { return *reinterpret_cast<std::atomic<int>*>(piece.whole); }

char* map(int fd, size_t bytes) {
    void* at = mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

void drop(std::map<void*, Piece>::iterator found) {
    munmap(found->second.whole, found->second.bytes + kPage);
    if (found->second.fd >= 0) close(found->second.fd);
    pieces.erase(found);
}

}  // namespace

extern "C" {

void double_use_streams(decltype(stream_copy) copy, decltype(stream_synchronize) synchronize) {
    stream_copy = copy, stream_synchronize = synchronize;
}

// A graph is captured from now on, in some thread; what ends it is seen by asking.
void double_capture(bool on) { capturing = on; }
bool double_captures() { return capturing; }
// Bytes that are allocated or open, and so many allocations from now on fail.
size_t double_bytes() {
    std::lock_guard lock(mutex);
    size_t sum = 0;
    for (auto& [at, piece] : pieces) sum += piece.bytes;
    return sum;
}
void double_fail(int count) { failing = count; }

int cudaGetLastError() {
    int found = last_error;
    last_error = 0;
    return found;
}

int cudaSetDevice(int number) {
    if (number < 0 || number >= kDevices) return noted(kInvalidDevice);
    device = number;
    return 0;
}

int cudaThreadExchangeStreamCaptureMode(int* mode) {
    if (mode == nullptr || *mode < 0 || *mode > kRelaxed) return noted(kInvalidValue);
    std::swap(*mode, capture_mode);
    return 0;
}

static int malloc_here(void** out, size_t bytes) {
    if (int error = about_memory()) return error;
    if (failing > 0) {
        --failing;
        return kOutOfMemory;
    }
    std::lock_guard lock(mutex);
    int fd = memfd_create("cudart-double", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, off_t(bytes + kPage)) != 0) return kOutOfMemory;
    char* whole = map(fd, bytes);
    if (whole == nullptr) return kOutOfMemory;
    *out = whole + kPage;
    pieces[*out] = {whole, bytes, fd, device};
    return 0;
}
int cudaMalloc(void** out, size_t bytes) { return noted(malloc_here(out, bytes)); }

static int free_here(void* address) {
    if (int error = about_memory()) return error;
    std::lock_guard lock(mutex);
    auto found = pieces.find(address);
    if (found == pieces.end() || found->second.fd < 0) return kInvalidValue;
    if (found->second.device != device) return kInvalidContext;
    if (opens(found->second).load() != 0) {
        std::fprintf(stderr, "cudaFree of memory that another process has open\n");
        std::abort();
    }
    drop(found);
    return 0;
}
int cudaFree(void* address) { return noted(free_here(address)); }

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
    if (kind != 4) return noted(kInvalidValue);
    if (stream_copy) {
        int result = stream_copy(stream, to, from, bytes);
        return result || stream ? result : stream_synchronize(stream);
    }
    std::lock_guard lock(mutex);
    pending[stream].push_back({to, from, bytes});
    return 0;
}

int cudaStreamSynchronize(void* stream) {
    if (stream_synchronize) return stream_synchronize(stream);
    std::lock_guard lock(mutex);
    for (auto& copy : pending[stream]) std::memmove(copy.to, copy.from, copy.bytes);
    pending[stream].clear();
    return 0;
}

int cudaGetDevice(int* out) {
    *out = device;
    return 0;
}

// Somebody has asked for it before, as torch does.
int cudaDeviceEnablePeerAccess(int peer, unsigned) {
    return noted(peer == device || peer < 0 || peer >= kDevices ? kInvalidDevice : kPeerAccessAlreadyEnabled);
}

int cudaIpcGetMemHandle(Handle* out, void* address) {
    std::lock_guard lock(mutex);
    auto found = pieces.find(address);
    if (found == pieces.end() || found->second.fd < 0) return noted(kInvalidValue);
    *out = {int(getpid()), found->second.fd, found->second.bytes, {}};
    return 0;
}

static int open_here(void** out, Handle handle, unsigned flags) {
    if (int error = about_memory()) return error;
    std::lock_guard lock(mutex);
    if (flags != 1) return kInvalidValue;
    if (handle.pid == int(getpid())) return kInvalidContext;
    std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
    int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    char* whole = fd < 0 ? nullptr : map(fd, handle.bytes);
    if (fd >= 0) close(fd);
    if (whole == nullptr) return kInvalidHandle;
    *out = whole + kPage;
    pieces[*out] = {whole, handle.bytes, -1, device};
    opens(pieces[*out]).fetch_add(1);
    return 0;
}
int cudaIpcOpenMemHandle(void** out, Handle handle, unsigned flags) {
    return noted(open_here(out, handle, flags));
}

static int close_here(void* address) {
    if (int error = about_memory()) return error;
    std::lock_guard lock(mutex);
    auto found = pieces.find(address);
    if (found == pieces.end() || found->second.fd >= 0) return kInvalidValue;
    if (found->second.device != device) return kInvalidContext;
    opens(found->second).fetch_sub(1);
    drop(found);
    return 0;
}
int cudaIpcCloseMemHandle(void* address) { return noted(close_here(address)); }

const char* cudaGetErrorString(int error) { return error == kOutOfMemory ? "out of memory" : "invalid"; }

}  // extern "C"
