#include "hccl_links.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "hccl_acceptor.hpp"

namespace hccl {
namespace {

constexpr int64_t kSliceMs = 50;
constexpr int64_t kFlushMs = 2000;
const std::string kWelcome = "welcome";

// A process may have several ranks of a communicator (HcclCommInitAll).
std::string name_of(const std::string& communicator, size_t rank) {
  return communicator + "#" + std::to_string(rank);
}

enum class Kind : uint64_t { data, goodbye };

enum class Answer { none, welcome, gone };

// What a peer that was dialled says within a slice. It sends one welcome, in one piece: nothing is
// read before it is there, so that none is taken for a hang-up that comes a moment too late.
Answer answer_on(int fd) {
  pollfd readable{fd, POLLIN, 0};
  if (poll(&readable, 1, static_cast<int>(kSliceMs)) <= 0) return Answer::none;
  std::string text;
  const bool is_read = read_message(fd, text, now_ms() + kSliceMs);
  return is_read && text == kWelcome ? Answer::welcome : Answer::gone;
}

struct Header {
  Kind kind;
  Tag tag;
  uint64_t size;
};

struct Link {
  Descriptor fd;
  LinkState state = LinkState::none;
  int64_t lost_ms = 0;
  std::optional<Descriptor> caller;  // dialled us, and waits for our welcome
  std::deque<std::string> unsent;
  size_t sent_of_first = 0;
  // What is being received: the header first, then its bytes.
  Header header{};
  size_t header_got = 0;
  Buffer body;
  size_t body_got = 0;
};

}  // namespace

struct Links::State {
  std::string id;
  std::string secret;
  size_t rank;
  std::vector<Member> members;
  std::mutex lock;
  std::condition_variable changed;
  std::vector<Link> links;
  std::map<std::pair<size_t, Tag>, Buffer> inbox;
  std::set<const WakeUp*> watchers;
  uint64_t epoch = 0;
  bool has_thread = false;
  bool is_closed = false;
  WakeUp wake;

  // Everything below is called with the lock held.
  void tell() {
    for (const WakeUp* watcher : watchers) watcher->set();
    changed.notify_all();
  }

  void bring_up(Link& link, Descriptor fd) {
    set_nonblocking(fd.get());
    link.fd = std::move(fd);
    link.state = LinkState::up;
    link.header_got = link.body_got = link.sent_of_first = 0;
    link.unsent.clear();
    wake.set();
    tell();
  }

  void lose(Link& link, LinkState state) {
    link.fd = Descriptor();
    link.state = state;
    link.lost_ms = now_ms();
    link.unsent.clear();
    tell();
  }

  // Writes what the socket takes; false where the link is lost.
  bool flush(Link& link) {
    while (!link.unsent.empty()) {
      const std::string& first = link.unsent.front();
      const ssize_t sent = ::send(link.fd.get(), first.data() + link.sent_of_first,
                                  first.size() - link.sent_of_first, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) return errno == EAGAIN || errno == EINTR;
      link.sent_of_first += static_cast<size_t>(sent);
      if (link.sent_of_first == first.size()) {
        link.unsent.pop_front();
        link.sent_of_first = 0;
      }
    }
    return true;
  }

  void post(Link& link, Header header, const void* data) {
    size_t sent = 0;
    const size_t whole = sizeof(header) + header.size;
    if (link.unsent.empty()) {
      iovec parts[2] = {{&header, sizeof(header)}, {const_cast<void*>(data), header.size}};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = 2;
      const ssize_t taken = sendmsg(link.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (taken < 0 && errno != EAGAIN && errno != EINTR) return lose(link, LinkState::lost);
      sent = taken < 0 ? 0 : static_cast<size_t>(taken);
    }
    if (sent == whole) return;
    std::string rest;
    if (sent < sizeof(header)) {
      rest.assign(reinterpret_cast<const char*>(&header) + sent, sizeof(header) - sent);
    }
    const size_t data_sent = sent < sizeof(header) ? 0 : sent - sizeof(header);
    rest.append(static_cast<const char*>(data) + data_sent, header.size - data_sent);
    link.unsent.push_back(std::move(rest));
    wake.set();
  }

  void deliver(size_t peer, Link& link) {
    link.header_got = link.body_got = 0;
    if (link.header.kind == Kind::goodbye) {
      lose(link, LinkState::closed);
    } else if (link.header.tag.epoch >= epoch) {
      inbox[{peer, link.header.tag}] = std::move(link.body);
      tell();
    }
    link.body = Buffer();
  }

  // Reads until the socket is empty; false where the link is lost.
  bool receive(size_t peer, Link& link) {
    while (link.state == LinkState::up) {
      const bool in_header = link.header_got < sizeof(Header);
      char* into = in_header ? reinterpret_cast<char*>(&link.header) + link.header_got
                             : link.body.bytes.get() + link.body_got;
      const size_t wanted =
          in_header ? sizeof(Header) - link.header_got : link.body.size - link.body_got;
      if (wanted > 0) {
        const ssize_t got = recv(link.fd.get(), into, wanted, MSG_DONTWAIT);
        if (got == 0) return false;
        if (got < 0) return errno == EAGAIN || errno == EINTR;
        (in_header ? link.header_got : link.body_got) += static_cast<size_t>(got);
        if (in_header && link.header_got == sizeof(Header)) {
          link.body.size = link.header.size;
          link.body.bytes = std::make_unique_for_overwrite<char[]>(link.body.size);
        }
      }
      if (link.header_got == sizeof(Header) && link.body_got == link.body.size) deliver(peer, link);
    }
    return true;
  }

  bool has_unsent() const {
    return std::ranges::any_of(links, [](const Link& link) { return !link.unsent.empty(); });
  }

  void serve(const std::vector<pollfd>& polled, const std::vector<size_t>& peers) {
    for (size_t i = 0; i < peers.size(); i++) {
      Link& link = links[peers[i]];
      // Another connection may have taken its place while this thread slept.
      if (link.state != LinkState::up || link.fd.get() != polled[i].fd) continue;
      const short events = polled[i].revents;
      bool is_alive = true;
      if (events & (POLLIN | POLLHUP | POLLERR)) is_alive = receive(peers[i], link);
      if (is_alive && link.state == LinkState::up && (events & POLLOUT)) is_alive = flush(link);
      if (!is_alive) lose(link, LinkState::lost);
    }
  }

  // Of the thread: moves frames until the links are closed and everything is sent.
  void run() {
    int64_t flush_until_ms = 0;
    while (true) {
      std::vector<pollfd> polled;
      std::vector<size_t> peers;
      {
        std::unique_lock guard(lock);
        if (is_closed && flush_until_ms == 0) flush_until_ms = now_ms() + kFlushMs;
        if (is_closed && (!has_unsent() || now_ms() > flush_until_ms)) break;
        for (size_t peer = 0; peer < links.size(); peer++) {
          const Link& link = links[peer];
          if (link.state != LinkState::up) continue;
          const int events = POLLIN | (link.unsent.empty() ? 0 : POLLOUT);
          polled.push_back({link.fd.get(), static_cast<short>(events), 0});
          peers.push_back(peer);
        }
      }
      polled.push_back({wake.get(), POLLIN, 0});
      poll(polled.data(), polled.size(), 1000);
      wake.clear();
      std::unique_lock guard(lock);
      serve(polled, peers);
    }
    std::unique_lock guard(lock);
    for (Link& link : links) link.fd = Descriptor();
    has_thread = false;
    changed.notify_all();
  }
};

Links::Links(std::string id, std::string secret, size_t rank, std::vector<Member> members)
    : state_(std::make_shared<State>()) {
  state_->id = std::move(id);
  state_->secret = std::move(secret);
  state_->rank = rank;
  state_->members = std::move(members);
  state_->links = std::vector<Link>(state_->members.size());
  accept_links(name_of(state_->id, rank), [weak = std::weak_ptr(state_)](Descriptor fd, size_t from,
                                                          const std::string& given) {
    const auto state = weak.lock();
    if (!state || from >= state->links.size() || !is_same_secret(given, state->secret)) return;
    std::unique_lock guard(state->lock);
    state->links[from].caller = std::move(fd);
    state->changed.notify_all();
  });
}

Links::~Links() { close(); }

bool Links::connect(const std::vector<size_t>& peers, int64_t until_ms, size_t& missing) {
  State& state = *state_;
  std::unique_lock guard(state.lock);
  for (const size_t peer : peers) {
    missing = peer;
    Link& link = state.links[peer];
    Descriptor dialled;
    while (peer != state.rank && link.state == LinkState::none) {
      if (state.is_closed || now_ms() >= until_ms) return false;
      if (peer < state.rank) {  // it dials
        if (link.caller && write_message(link.caller->get(), kWelcome, now_ms() + kSliceMs)) {
          Descriptor fd = std::move(*link.caller);
          link.caller.reset();
          state.bring_up(link, std::move(fd));
        } else {
          link.caller.reset();
          state.changed.wait_for(guard, std::chrono::milliseconds(kSliceMs));
        }
        continue;
      }
      guard.unlock();
      if (!dialled) dialled = dial_link(state.members[peer].address, name_of(state.id, peer), state.secret,
                                       state.rank);
      const Answer answer = dialled ? answer_on(dialled.get()) : Answer::gone;
      if (answer == Answer::gone) {
        dialled = Descriptor();
        std::this_thread::sleep_for(std::chrono::milliseconds(kSliceMs));
      }
      guard.lock();
      if (answer == Answer::welcome) state.bring_up(link, std::move(dialled));
    }
  }
  if (!state.has_thread && !state.is_closed) {
    state.has_thread = true;
    std::thread([shared = state_] { shared->run(); }).detach();
  }
  return !state.is_closed;
}

void Links::send(size_t peer, const Tag& tag, const void* data, size_t size) {
  State& state = *state_;
  std::unique_lock guard(state.lock);
  if (peer == state.rank) {
    Buffer copy{std::make_unique_for_overwrite<char[]>(size), size};
    if (size > 0) std::memcpy(copy.bytes.get(), data, size);
    state.inbox[{peer, tag}] = std::move(copy);
    state.tell();
    return;
  }
  Link& link = state.links[peer];
  // To a peer that is gone the data is lost, as on a device; whoever waits for it times out.
  if (link.state == LinkState::up) state.post(link, {Kind::data, tag, size}, size > 0 ? data : "");
}

std::optional<Buffer> Links::take(size_t peer, const Tag& tag) {
  std::unique_lock guard(state_->lock);
  auto found = state_->inbox.extract({peer, tag});
  if (found.empty()) return std::nullopt;
  return std::move(found.mapped());
}

Links::Peer Links::peer(size_t rank) {
  std::unique_lock guard(state_->lock);
  return {state_->links[rank].state, state_->links[rank].lost_ms};
}

void Links::watch(const WakeUp& wake) {
  std::unique_lock guard(state_->lock);
  state_->watchers.insert(&wake);
}

void Links::unwatch(const WakeUp& wake) {
  std::unique_lock guard(state_->lock);
  state_->watchers.erase(&wake);
}

void Links::begin_epoch(uint64_t epoch) {
  std::unique_lock guard(state_->lock);
  state_->epoch = epoch;
  std::erase_if(state_->inbox, [&](const auto& frame) { return frame.first.second.epoch < epoch; });
}

void Links::cut(const std::vector<size_t>& peers) {
  std::unique_lock guard(state_->lock);
  for (const size_t peer : peers) {
    Link& link = state_->links[peer];
    if (link.state != LinkState::up) continue;
    state_->lose(link, LinkState::lost);
    // A device writes to a peer only once that peer has begun the operation and said so; a frame
    // that came ahead of that would have been written over the link that is down.
    std::erase_if(state_->inbox, [&](const auto& frame) { return frame.first.first == peer; });
  }
}

void Links::close() {
  State& state = *state_;
  {
    std::unique_lock guard(state.lock);
    if (state.is_closed) return;
    for (Link& link : state.links) {
      if (link.state == LinkState::up) state.post(link, {Kind::goodbye, {}, 0}, "");
    }
    state.is_closed = true;
    state.tell();
    state.wake.set();
    if (state.has_unsent()) {
      state.changed.wait_for(guard, std::chrono::milliseconds(kFlushMs),
                             [&] { return !state.has_thread; });
    }
  }
  refuse_links(name_of(state.id, state.rank));
}

bool Links::is_closed() {
  std::unique_lock guard(state_->lock);
  return state_->is_closed;
}

}  // namespace hccl
