// The suite's tests of order: streams, events, callbacks.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/device/device_suite.h"

namespace phub {
namespace {

TEST_P(DeviceSuite, AnEventIsDoneWhenWhatWasBeforeItIs) {
  const auto event = device_->make_event();
  EXPECT_TRUE(event->done()) << "not recorded yet";
  event->wait();
  StreamGate gate;
  gate.close(*stream_);
  stream_->record(*event);
  EXPECT_FALSE(event->done());
  gate.open();
  event->wait();
  EXPECT_TRUE(event->done());
}

TEST_P(DeviceSuite, AStreamWaitsForAnotherWithoutTheHost) {
  const auto producer = device_->make_stream("producer");
  const auto event = device_->make_event();
  const auto values = random_floats(1000);
  const HostMemory host(*device_, 4000, "host");
  std::copy(values.begin(), values.end(), host.floats().begin());
  const DeviceMemory a = memory(4000);
  const DeviceMemory b = memory(4000);
  StreamGate gate;
  gate.close(*producer);
  producer->copy_to_device(a.data(), host.data(), 4000);
  producer->record(*event);
  stream_->wait(*event);
  stream_->copy_on_device(b.data(), a.data(), 4000);
  const auto copied = device_->make_event();
  stream_->record(*copied);
  EXPECT_FALSE(copied->done());
  EXPECT_TRUE(is_poisoned(bytes(b.data(), 4000))) << "what is waited for has not begun";
  gate.open();
  copied->wait();
  EXPECT_EQ(floats(b.data(), 1000), values);
}

// A wait is for the record() before it, also if the event is recorded elsewhere afterwards.
TEST_P(DeviceSuite, AWaitKeepsTheRecordThatItSaw) {
  const auto slow = device_->make_stream("slow");
  const auto quick = device_->make_stream("quick");
  const auto event = device_->make_event();
  StreamGate gate;
  gate.close(*slow);
  slow->record(*event);
  std::atomic<bool> ran = false;
  stream_->wait(*event);
  stream_->call([&] { ran = true; });
  quick->record(*event);
  event->wait();  // the second record
  EXPECT_FALSE(ran);
  gate.open();
  stream_->synchronize();
  EXPECT_TRUE(ran);
}

TEST_P(DeviceSuite, CallbacksRunInTheOrderOfTheStream) {
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) {
    stream_->call([&order, i] { order.push_back(i); });
  }
  stream_->synchronize();
  ASSERT_EQ(order.size(), 100u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(code_of([&] { stream_->call(nullptr); }), ErrorCode::kInvalid);
}

TEST_P(DeviceSuite, OtherStreamsGoOnWhileOneIsHeldUp) {
  const auto held = device_->make_stream("held");
  const DeviceMemory a = memory(4000);
  const HostMemory host(*device_, 4000, "host");
  StreamGate gate;
  gate.close(*held);
  stream_->fill(a.floats(), 5.0f, 1000);
  stream_->copy_to_host(host.data(), a.data(), 4000);
  stream_->work_for(std::chrono::microseconds(10));
  stream_->synchronize();
  EXPECT_EQ(host.floats()[999], 5.0f);
}

TEST_P(DeviceSuite, TimedWorkTakesItsTimeInOrder) {
  const auto begin = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point called;
  stream_->work_for(std::chrono::milliseconds(5));
  stream_->work_for(std::chrono::milliseconds(5));
  stream_->call([&] { called = std::chrono::steady_clock::now(); });
  stream_->synchronize();
  EXPECT_GE(called - begin, std::chrono::milliseconds(10));
}

TEST_P(DeviceSuite, AStreamEndsWithItsWork) {
  StreamGate gate;
  std::atomic<int> ran = 0;
  auto other = device_->make_stream("other");
  const auto event = device_->make_event();
  gate.close(*other);
  for (int i = 0; i < 10; ++i) other->call([&] { ++ran; });
  other->record(*event);
  std::thread opener([&] { gate.open(); });
  other.reset();
  EXPECT_EQ(ran, 10);
  EXPECT_TRUE(event->done());
  opener.join();
  // The event goes on to mean that, also to streams that come later.
  other = device_->make_stream("later");
  StreamGate second;
  second.close(*other);
  EXPECT_TRUE(event->done());
}

TEST_P(DeviceSuite, EventsOfAnotherDeviceAreRefused) {
  const auto other = GetParam().make(4096);
  const auto event = other->make_event();
  EXPECT_EQ(code_of([&] { stream_->record(*event); }), ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] { stream_->wait(*event); }), ErrorCode::kInvalid);
}

TEST_P(DeviceSuite, ManyThreadsShareStreamsAndMemory) {
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  std::atomic<int> ran = 0;
  const auto shared = device_->make_event();
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const auto own = device_->make_stream("own");
      const auto event = device_->make_event();
      for (int i = 0; i < 50; ++i) {
        const DeviceMemory mine(*device_, 1000, "mine");
        const HostMemory host(*device_, 1000, "host");
        const float value = thread * 1000.0f + i;
        own->fill(mine.floats(), value, 250);
        own->copy_to_host(host.data(), mine.data(), 1000);
        own->record(*event);
        own->record(*shared);
        stream_->wait(*event);
        stream_->call([&ran] { ++ran; });
        shared->wait();
        event->wait();
        ASSERT_EQ(host.floats()[249], value);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stream_->synchronize();
  EXPECT_EQ(ran, kThreads * 50);
}

}  // namespace
}  // namespace phub
