// Stories: the order in which they go on, who owns them while they wait, and their errors. Without
// LeakSanitizer the counts of variables that live show the same.
#include "phub/task.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace phub {
namespace task_test {

using ::testing::ElementsAre;

// A desk that answers later, or at once, or throws, or forgets the question.
class Desk {
 public:
  explicit Desk(Background& thread) : thread_(thread) {}

  void ask(Reply<std::string> reply) { asked.push_back(std::move(reply)); }

  Task<std::string> question(std::string name, std::shared_ptr<int> lives) {
    const auto ask_it = [&](Reply<std::string> reply) { ask(std::move(reply)); };
    const std::string answer = co_await answer_to<std::string>(ask_it);
    log.push_back(name + " has " + answer);
    co_return answer + "!" + std::to_string(lives.use_count() > 0);
  }
  Task<std::string> two_questions(std::string name, std::shared_ptr<int> lives) {
    std::string both = co_await question(name, lives);
    both += co_await question(name, lives);
    co_return both;
  }
  Task<std::string> at_once(std::string word, std::shared_ptr<int> lives) {
    const auto reply_now = [&](const Reply<std::string>& reply) { reply(std::string(word)); };
    const std::string answer = co_await answer_to<std::string>(reply_now);
    co_return answer + std::to_string(lives.use_count() > 0);
  }
  Task<std::string> nobody_asked(std::shared_ptr<int> lives) {
    const auto forget = [](const Reply<std::string>&) {};
    co_await answer_to<std::string>(forget);
    log.push_back("never");
    co_return std::string(lives ? "never" : "");
  }
  Task<std::string> throws_at_the_question(std::shared_ptr<int> lives) {
    std::string said;
    const auto refuse = [](const Reply<std::string>&) { fail(ErrorCode::kTaken, "not now"); };
    try {
      co_await answer_to<std::string>(refuse);
    } catch (const Error& error) {
      said = error.what();
    }
    if (lives) fail(ErrorCode::kFull, "after: {}", said);
    co_return said;
  }
  Task<std::string> keeps_the_question_and_throws(std::shared_ptr<int> lives) {
    const auto refuse = [&](Reply<std::string> reply) {
      ask(std::move(reply));
      fail(ErrorCode::kTaken, "not now, {}", lives.use_count() > 0);
    };
    co_return co_await answer_to<std::string>(refuse);
  }
  Task<std::string> throws_what_is_no_error(std::shared_ptr<int> lives) {
    if (lives) throw std::runtime_error("what is no Error");
    co_return "never";
  }
  Task<std::string> works(uint32_t number, std::shared_ptr<int> lives) {
    std::string text(100, 'x');
    const auto work = [&] {
      text += std::to_string(number);
      if (number == 0) fail(ErrorCode::kFull, "no number");
    };
    if (const auto failed = co_await beside(thread_, work)) throw Error(*failed);
    co_return text.substr(100) + (lives ? "" : "never");
  }
  Story waits(std::string name, Event* event, std::shared_ptr<int> lives) {
    co_await event->next();
    log.push_back(name);
    co_await event->next();
    log.push_back(name + " again, of " + std::to_string(lives.use_count()));
  }
  Story makes_happen(Event* event) {
    co_await event->happen_after_me();
    log.push_back("first");
    co_await event->next();
    log.push_back("first again");
  }

  std::vector<Reply<std::string>> asked;
  std::vector<std::string> log;

 private:
  Background& thread_;
};

class TaskTest : public ::testing::Test {
 protected:
  Reply<std::string> note() {
    return [this](const Result<std::string>& result) {
      said_.push_back(result ? *result.value
                             : std::string(name_of(result.code)) + ": " + result.message);
    };
  }
  // All variables of all stories are gone.
  bool all_gone() const { return lives_.use_count() == 1; }

  std::shared_ptr<int> lives_ = std::make_shared<int>();
  std::vector<std::string> said_;
  Background thread_;
  Desk desk_{thread_};
};

TEST_F(TaskTest, GoesOnInTheCallThatAnswers) {
  answer(desk_.two_questions("a", lives_), note());
  answer(desk_.two_questions("b", lives_), note());
  ASSERT_EQ(desk_.asked.size(), 2u);
  EXPECT_TRUE(desk_.log.empty());
  Reply<std::string>(desk_.asked[1])(std::string("1"));
  EXPECT_THAT(desk_.log, ElementsAre("b has 1"));
  ASSERT_EQ(desk_.asked.size(), 3u) << "the next question is asked in the same call";
  Reply<std::string>(desk_.asked[2])(std::string("2"));
  EXPECT_THAT(said_, ElementsAre("1!12!1"));
  Reply<std::string>(desk_.asked[0])({ErrorCode::kFull, "no room"});
  EXPECT_THAT(said_, ElementsAre("1!12!1", "full: no room"));
  EXPECT_TRUE(all_gone());
}

TEST_F(TaskTest, AnAnswerMayComeAtOnce) {
  answer(desk_.at_once("now", lives_), note());
  EXPECT_THAT(said_, ElementsAre("now1"));
  EXPECT_TRUE(all_gone());
}

TEST_F(TaskTest, AStoryGoesWithTheLastWhoCouldAnswer) {
  answer(desk_.two_questions("a", lives_), note());
  Reply<std::string> copy = desk_.asked[0];
  desk_.asked.clear();
  EXPECT_FALSE(all_gone());
  copy = nullptr;
  EXPECT_TRUE(all_gone());
  answer(desk_.nobody_asked(lives_), note());
  EXPECT_TRUE(all_gone());
  { const Task<std::string> never_begun = desk_.question("c", lives_); }
  EXPECT_TRUE(all_gone());
  EXPECT_TRUE(desk_.log.empty() && said_.empty());
}

TEST_F(TaskTest, AnErrorFailsTheTask) {
  answer(desk_.throws_at_the_question(lives_), note());
  EXPECT_THAT(said_, ElementsAre("full: after: not now"));
  EXPECT_TRUE(all_gone());
}

TEST_F(TaskTest, AnAnswerToAQuestionThatFailedChangesNothing) {
  answer(desk_.keeps_the_question_and_throws(lives_), note());
  EXPECT_THAT(said_, ElementsAre("taken: not now, true"));
  EXPECT_TRUE(all_gone());
  ASSERT_EQ(desk_.asked.size(), 1u);
  desk_.asked[0](std::string(100, 'x'));
  EXPECT_EQ(said_.size(), 1u);
}

TEST_F(TaskTest, AnExceptionThatIsNoErrorEndsTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(answer(desk_.throws_what_is_no_error(lives_), note()), "what is no Error");
}

TEST_F(TaskTest, WorkBesideItUsesItsVariables) {
  answer(desk_.works(7, lives_), note());
  answer(desk_.works(0, lives_), note());
  EXPECT_TRUE(said_.empty());
  thread_.finish();
  EXPECT_THAT(said_, ElementsAre("7", "full: no number"));
  EXPECT_TRUE(all_gone());
}

TEST_F(TaskTest, AThreadThatEndsDropsItsStories) {
  thread_.start();
  for (uint32_t i = 0; i < 100; ++i) answer(desk_.works(i, lives_), note());
  thread_.drop();
  EXPECT_TRUE(said_.empty());
  EXPECT_TRUE(all_gone());
}

TEST_F(TaskTest, AnEventLetsStoriesGoOnInOrder) {
  Event event;
  desk_.waits("a", &event, lives_);
  desk_.waits("b", &event, lives_);
  desk_.makes_happen(&event);
  EXPECT_THAT(desk_.log, ElementsAre("first", "a", "b"));
  desk_.log.clear();
  event.happen();
  EXPECT_THAT(desk_.log, ElementsAre("first again", "a again, of 3", "b again, of 2"));
  EXPECT_TRUE(all_gone());
  event.happen();
  {
    Event never;
    desk_.waits("c", &never, lives_);
    EXPECT_FALSE(all_gone());
  }
  EXPECT_TRUE(all_gone());
}

}  // namespace task_test
}  // namespace phub
