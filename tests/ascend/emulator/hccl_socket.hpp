// Sockets between the ranks of one machine.
//
// Addresses are "unix:NAME", an abstract Unix socket, or "tcp:IP:PORT". Times are milliseconds of
// the monotonic clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace hccl {

// A descriptor that closes itself.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Wakes a poll(2); stays readable until it is cleared.
class WakeUp {
 public:
  WakeUp();
  int get() const { return fd_.get(); }
  void set() const;
  void clear() const;

 private:
  Descriptor fd_;
};

int64_t now_ms();

// An environment variable as a whole number, or `otherwise` where it is not set.
// Throws std::invalid_argument where it is not a number.
int64_t environment_number(const char* name, int64_t otherwise);

// The server that this process is on: HCCL_IF_IP, or 127.0.0.1.
std::string server_ip();

// Whether the first is the same bytes as the second, in time that does not tell where they differ.
bool is_same_secret(const std::string& one, const std::string& other);
std::string random_hex(size_t num_bytes);

// Listens at an address of its own choice, which it writes to `address`.
// Throws std::system_error.
Descriptor listen_anywhere(std::string& address);

// Invalid where nobody listens there.
Descriptor dial(const std::string& address);

void set_nonblocking(int fd);

// Whole messages on a blocking socket, each a length and its bytes; they return false where the
// peer is gone or `until_ms` has passed.
bool write_message(int fd, const std::string& text, int64_t until_ms);
bool read_message(int fd, std::string& text, int64_t until_ms);

}  // namespace hccl
