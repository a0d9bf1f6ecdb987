#include "streams.hpp"

#include <pthread.h>
#include <signal.h>

#include <cstring>
#include <map>
#include <thread>

#include "abi.hpp"

namespace nccl_double {
namespace {

// As the CUDA runtime numbers them.
enum Status : int { kOk = 0, kInvalidValue = 1, kInvalidHandle = 400, kNotReady = 600 };

constexpr std::chrono::seconds kIdle{2};

struct Event {
    bool timing;
    std::shared_ptr<Mark> mark;  // of the last record
};

// Never destroyed: threads may still run while the process ends.
struct Tables {
    std::mutex mutex;
    std::map<void*, std::shared_ptr<Stream>> streams;
    std::map<void*, Event> events;
};
Tables& tables() {
    static Tables* t = new Tables;
    return *t;
}

// A handle is an address that is never used again, so that one which was destroyed is recognised.
void* new_handle() { return new char; }

struct DefaultStream {
    std::shared_ptr<Stream> stream = std::make_shared<Stream>();
    ~DefaultStream() { stream->release(); }
};
thread_local DefaultStream default_stream;
thread_local int device;

std::shared_ptr<Mark> mark_of(void* event, bool* known) {
    std::lock_guard lock(tables().mutex);
    auto found = tables().events.find(event);
    *known = found != tables().events.end();
    return *known ? found->second.mark : nullptr;
}

int enqueue(void* handle, Stream::Task task) {
    auto stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    stream->enqueue(std::move(task));
    return kOk;
}

}  // namespace

void start_thread(std::function<void()> body) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(std::move(body)).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Mark::set() {
    std::lock_guard lock(mutex_);
    reached_ = true;
    when_ = std::chrono::steady_clock::now();
    changed_.notify_all();
}

void Mark::wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
}

bool Mark::reached() {
    std::lock_guard lock(mutex_);
    return reached_;
}

std::chrono::steady_clock::time_point Mark::when() {
    std::lock_guard lock(mutex_);
    return when_;
}

void Stream::enqueue(Task task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (!thread_) {
        thread_ = true;
        start_thread([self = shared_from_this()] { self->work(); });
    }
    changed_.notify_one();
}

void Stream::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        if (tasks_.empty() && !released_)
            changed_.wait_for(lock, kIdle, [&] { return !tasks_.empty() || released_; });
        if (tasks_.empty()) break;
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        busy_ = true;
        lock.unlock();
        task();
        task = nullptr;  // what it held goes before the stream counts as idle
        lock.lock();
        busy_ = false;
    }
    thread_ = false;
}

bool Stream::idle() {
    std::lock_guard lock(mutex_);
    return tasks_.empty() && !busy_;
}

void Stream::synchronize() {
    if (idle()) return;
    auto mark = std::make_shared<Mark>();
    enqueue([mark] { mark->set(); });
    mark->wait();
}

void Stream::release() {
    std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_one();
}

std::shared_ptr<Stream> find_stream(void* handle) {
    if (!handle) return default_stream.stream;
    std::lock_guard lock(tables().mutex);
    auto found = tables().streams.find(handle);
    return found == tables().streams.end() ? nullptr : found->second;
}

int current_device() { return device; }

}  // namespace nccl_double

using namespace nccl_double;

EXPORT int double_set_device(int number) {
    if (number < 0) return kInvalidValue;
    device = number;
    return kOk;
}

EXPORT int double_stream_create(void** stream) {
    if (!stream) return kInvalidValue;
    std::lock_guard lock(tables().mutex);
    *stream = new_handle();
    tables().streams[*stream] = std::make_shared<Stream>();
    return kOk;
}

// Returns at once; what is enqueued still runs.
EXPORT int double_stream_destroy(void* handle) {
    auto stream = find_stream(handle);
    if (!handle || !stream) return kInvalidHandle;
    stream->release();
    std::lock_guard lock(tables().mutex);
    tables().streams.erase(handle);
    return kOk;
}

EXPORT int double_stream_synchronize(void* handle) {
    auto stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    stream->synchronize();
    return kOk;
}

EXPORT int double_stream_query(void* handle) {
    auto stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    return stream->idle() ? kOk : kNotReady;
}

EXPORT int double_stream_wait_event(void* handle, void* event) {
    bool known;
    auto mark = mark_of(event, &known);
    if (!known) return kInvalidHandle;
    if (!mark) return find_stream(handle) ? kOk : kInvalidHandle;  // never recorded: nothing to wait for
    return enqueue(handle, [mark] { mark->wait(); });
}

EXPORT int double_stream_sleep(void* handle, double ms) {
    if (!(ms >= 0)) return kInvalidValue;
    return enqueue(handle,
                   [ms] { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms)); });
}

EXPORT int double_stream_memset(void* handle, void* data, int value, size_t bytes) {
    if (!data && bytes) return kInvalidValue;
    return enqueue(handle, [=] { memset(data, value, bytes); });
}

EXPORT int double_stream_memcpy(void* handle, void* to, const void* from, size_t bytes) {
    if ((!to || !from) && bytes) return kInvalidValue;
    return enqueue(handle, [=] { memmove(to, from, bytes); });
}

EXPORT int double_stream_host_function(void* handle, void (*function)(void*), void* argument) {
    if (!function) return kInvalidValue;
    return enqueue(handle, [=] { function(argument); });
}

EXPORT int double_event_create(void** event, int timing) {
    if (!event) return kInvalidValue;
    std::lock_guard lock(tables().mutex);
    *event = new_handle();
    tables().events[*event] = Event{timing != 0, nullptr};
    return kOk;
}

EXPORT int double_event_destroy(void* event) {
    std::lock_guard lock(tables().mutex);
    return tables().events.erase(event) ? kOk : kInvalidHandle;
}

EXPORT int double_event_record(void* event, void* stream) {
    auto mark = std::make_shared<Mark>();
    auto target = find_stream(stream);
    if (!target) return kInvalidHandle;
    {
        std::lock_guard lock(tables().mutex);
        auto found = tables().events.find(event);
        if (found == tables().events.end()) return kInvalidHandle;
        found->second.mark = mark;
    }
    target->enqueue([mark] { mark->set(); });
    return kOk;
}

EXPORT int double_event_query(void* event) {
    bool known;
    auto mark = mark_of(event, &known);
    if (!known) return kInvalidHandle;
    return !mark || mark->reached() ? kOk : kNotReady;
}

EXPORT int double_event_synchronize(void* event) {
    bool known;
    auto mark = mark_of(event, &known);
    if (!known) return kInvalidHandle;
    if (mark) mark->wait();
    return kOk;
}

EXPORT int double_event_elapsed_ms(float* ms, void* start, void* end) {
    if (!ms) return kInvalidValue;
    std::shared_ptr<Mark> marks[2];
    for (int i = 0; i < 2; ++i) {
        std::lock_guard lock(tables().mutex);
        auto found = tables().events.find(i ? end : start);
        if (found == tables().events.end() || !found->second.timing || !found->second.mark)
            return kInvalidHandle;
        marks[i] = found->second.mark;
    }
    if (!marks[0]->reached() || !marks[1]->reached()) return kNotReady;
    *ms = std::chrono::duration<float, std::milli>(marks[1]->when() - marks[0]->when()).count();
    return kOk;
}
