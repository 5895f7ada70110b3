// Calls that must fail.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "transport/error.h"

namespace phub::testing {

// body() throws an Error of this code whose text has these words.
template <typename Body>
void expect_error(ErrorCode code, const std::string& words, Body body) {
  try {
    body();
    ADD_FAILURE() << "no error: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(name_of(error.code()), name_of(code));
    EXPECT_THAT(error.what(), ::testing::HasSubstr(words));
  }
}

}  // namespace phub::testing
