// Calls that must fail.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "transport/error.h"

namespace phub::testing {

// The text of the Error of this code that body() throws; "" and a failure: it throws none.
template <typename Body>
std::string error_of(ErrorCode code, Body body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(name_of(error.code()), name_of(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

// Its code and text; "none": body() throws none.
template <typename Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return std::string(name_of(error.code())) + ": " + error.what();
  }
  return "none";
}

// body() throws an Error of this code whose text has these words.
template <typename Body>
void expect_error(ErrorCode code, const std::string& words, Body body) {
  EXPECT_THAT(error_of(code, body), ::testing::HasSubstr(words));
}

}  // namespace phub::testing
