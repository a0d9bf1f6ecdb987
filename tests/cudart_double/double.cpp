// A double of the CUDA runtime over host memory, for tests of csrc/symm/cuda_ipc.cpp where there is no GPU.
// It is no emulator: it has the functions that are called there, with their signatures, and is strict about
// what the real one leaves undefined.
//
// With `double_use_streams` its streams are those of the other double, tests/nccl_double, where kernels run
// too. The default one is then the host's: what is put there is done when the call returns.
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
#include <vector>

namespace {

constexpr size_t kPage = 4096;
constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kInvalidHandle = 400;

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

int cudaMalloc(void** out, size_t bytes) {
    std::lock_guard lock(mutex);
    int fd = memfd_create("cudart-double", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, off_t(bytes + kPage)) != 0) return kOutOfMemory;
    char* whole = map(fd, bytes);
    if (whole == nullptr) return kOutOfMemory;
    *out = whole + kPage;
    pieces[*out] = {whole, bytes, fd};
    return 0;
}

int cudaFree(void* address) {
    std::lock_guard lock(mutex);
    auto found = pieces.find(address);
    if (found == pieces.end() || found->second.fd < 0) return kInvalidValue;
    if (opens(found->second).load() != 0) {
        std::fprintf(stderr, "cudaFree of memory that another process has open\n");
        std::abort();
    }
    drop(found);
    return 0;
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
    if (kind != 4) return kInvalidValue;
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
    *out = 0;
    return 0;
}

// There is one device.
int cudaDeviceEnablePeerAccess(int, unsigned) { return kInvalidValue; }

int cudaIpcGetMemHandle(Handle* out, void* address) {
    std::lock_guard lock(mutex);
    auto found = pieces.find(address);
    if (found == pieces.end() || found->second.fd < 0) return kInvalidValue;
    *out = {int(getpid()), found->second.fd, found->second.bytes, {}};
    return 0;
}

int cudaIpcOpenMemHandle(void** out, Handle handle, unsigned flags) {
    std::lock_guard lock(mutex);
    if (flags != 1) return kInvalidValue;
    if (handle.pid == int(getpid())) return kInvalidContext;
    std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
    int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    char* whole = fd < 0 ? nullptr : map(fd, handle.bytes);
    if (fd >= 0) close(fd);
    if (whole == nullptr) return kInvalidHandle;
    *out = whole + kPage;
    pieces[*out] = {whole, handle.bytes, -1};
    opens(pieces[*out]).fetch_add(1);
    return 0;
}

int cudaIpcCloseMemHandle(void* address) {
    std::lock_guard lock(mutex);
    auto found = pieces.find(address);
    if (found == pieces.end() || found->second.fd >= 0) return kInvalidValue;
    opens(found->second).fetch_sub(1);
    drop(found);
    return 0;
}

const char* cudaGetErrorString(int error) { return error == kOutOfMemory ? "out of memory" : "invalid"; }

}  // extern "C"
