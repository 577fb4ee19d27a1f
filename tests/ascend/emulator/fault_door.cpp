// Where faults are armed: a C function for the process itself, a socket for others.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "fault.hpp"

namespace ascend {
namespace {

std::string answer(const std::string& line) {
  const std::string wrong = command_fault(line);
  return wrong.empty() ? "ok\n" : "error: " + wrong + "\n";
}

void serve(int listener) {
  while (true) {
    const int client = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) continue;
    FILE* stream = fdopen(client, "r+");
    char line[512];
    while (fgets(line, sizeof line, stream) != nullptr) {
      fputs(answer(line).c_str(), stream);
      fflush(stream);
    }
    fclose(stream);
  }
}

}  // namespace

void serve_faults() {
  const char* folder = getenv("ASCEND_EMULATOR_FAULTS");
  if (folder == nullptr) return;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/%d.sock", folder,
                              static_cast<int>(getpid()));
  const bool fits = length > 0 && static_cast<size_t>(length) < sizeof address.sun_path;
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  unlink(address.sun_path);
  if (!fits || bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener, 8) != 0) {
    fprintf(stderr, "Ascend emulator: no faults can be commanded from outside: %s/%d.sock: %m\n",
            folder, static_cast<int>(getpid()));
    close(listener);
    return;
  }
  std::thread(serve, listener).detach();
}

}  // namespace ascend

// Returns "" or what is wrong with the line; valid until the thread's next call.
extern "C" __attribute__((visibility("default"))) const char* ascend_command_fault(
    const char* line) {
  thread_local std::string wrong;
  wrong = ascend::command_fault(line);
  return wrong.c_str();
}
