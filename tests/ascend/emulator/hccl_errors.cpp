#include "hccl_errors.hpp"

#include <sys/time.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>

namespace hccl {
namespace {

// "[PID: 7277] 2024-11-28-11:59:30.645.648 "
std::string origin() {
  timeval now{};
  gettimeofday(&now, nullptr);
  tm local{};
  localtime_r(&now.tv_sec, &local);
  char day[32];
  strftime(day, sizeof(day), "%Y-%m-%d-%H:%M:%S", &local);
  char text[96];
  snprintf(text, sizeof(text), "[PID: %d] %s.%03d.%03d ", getpid(), day,
           static_cast<int>(now.tv_usec / 1000), static_cast<int>(now.tv_usec % 1000));
  return text;
}

void report(const std::string& code, const std::string& symptom, const std::string& solution) {
  const std::string text = code + ": " + origin() + symptom + "\n        " + solution + "\n";
  ascend::set_error_message(text.c_str());
}

}  // namespace

void report_environment(const std::string& variable, const std::string& value,
                        const std::string& allowed) {
  report("EI0001", "Environment variable [" + variable + "] is invalid. Reason: it is [" + value +
                       "], expected is " + allowed + ".",
         "Solution: Set the environment variable to a valid value.");
}

void report_notify_timeout(const std::string& peer, const std::string& operation,
                           const std::string& abnormal) {
  report("EI0002",
         "The wait execution of the Notify register times out. Reason: The Notify register has not "
         "received the Notify record from remote rank [" +
             peer + "].base information: [" + operation + "] task information: [" + abnormal + "]",
         "Possible Cause: 1. An exception occurs during the execution on some NPUs in the cluster. "
         "As a result, collective communication operation failed.2. The execution speed on some "
         "NPU in the cluster is too slow to complete a communication operation within the timeout "
         "interval. (default 1800s, You can set the interval by using HCCL_EXEC_TIMEOUT.)3. The "
         "number of training samples of each NPU is inconsistent.4. Packet loss or other "
         "connectivity problems occur on the communication link.");
}

void report_parameter(const std::string& function, const std::string& parameter,
                      const std::string& value, const std::string& allowed) {
  report("EI0003", "In [" + function + "], value [" + value + "] for parameter [" + parameter +
                       "] is invalid. Reason: The collective communication operator has an invalid "
                       "argument. The expected value is " + allowed + ".",
         "Solution: Try again with a valid argument.");
}

void report_link_timeout(const std::string& local, const std::string& remote, int64_t timeout_s) {
  report("EI0006",
         "Getting socket times out. Reason: Remote Rank did not send the data in time. Please "
         "check the reason for the rank being stuck. localIpAddr[" + local + "], remoteIpAddr[" +
             remote + "]",
         "Solution: 1. Check the rank service processes with other errors or no errors in the "
         "cluster.2. If this error is reported for all NPUs, check whether the time difference "
         "between the earliest and latest errors is greater than the connect timeout interval (" +
             std::to_string(timeout_s) +
             "s by default). If so, adjust the timeout interval by using the HCCL_CONNECT_TIMEOUT "
             "environment variable.3. Check the connectivity of the communication link between "
             "nodes.");
}

void report_error_cqe(const std::string& local, const std::string& remote) {
  report("EI0013", "An error CQE occurred during operator execution. Local information: " + local +
                       ". Peer information: " + remote + ".",
         "Possible Cause: 1. The network between two devices is abnormal. For example, the network "
         "port is intermittently disconnected.2. The peer process exits abnormally in advance. As "
         "a result, the local end cannot receive the response from the peer end.");
}

void report_negotiation_timeout(const std::string& reason) {
  report("EI0015",
         "Communicator cluster information negotiation times out. Reason: " + reason + ".",
         "Solution: Check whether every rank of the communicator called its initialization within "
         "HCCL_CONNECT_TIMEOUT.");
}

void report_inner(const std::string& what) {
  report("EI9999", "Inner Error! " + what, "TraceBack (most recent call last):");
}

}  // namespace hccl
