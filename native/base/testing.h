// A native test program: CASE("behaviour") { EXPECT(...); } and TILEWISE_TEST_MAIN. Nothing to install.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace tilewise::testing {

struct Case {
  const char* name;
  std::function<void()> body;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> list;
  return list;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Register {
  Register(const char* name, std::function<void()> body) { cases().push_back({name, std::move(body)}); }
};

template <class A, class B>
void expect_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << file << ":" << line << ": expected " << text << " but found " << a << " and " << b;
  std::fprintf(stderr, "%s\n", out.str().c_str());
  ++failures();
}

inline void expect(bool holds, const char* text, const char* file, int line) {
  if (holds) return;
  std::fprintf(stderr, "%s:%d: expected %s\n", file, line, text);
  ++failures();
}

/// Runs the cases whose name contains argv[1] (all without it); the exit status says whether all passed.
inline int run(int argc, char** argv) {
  int ran = 0;
  for (const Case& c : cases()) {
    if (argc > 1 && std::strstr(c.name, argv[1]) == nullptr) continue;
    const int before = failures();
    c.body();
    ++ran;
    std::printf("%s %s\n", failures() == before ? "ok  " : "FAIL", c.name);
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", ran - (failures() > 0), failures());
  return failures() == 0 && ran > 0 ? 0 : 1;
}

}  // namespace tilewise::testing

#define TILEWISE_JOIN2(a, b) a##b
#define TILEWISE_JOIN(a, b) TILEWISE_JOIN2(a, b)
#define CASE(name)                                                                                               \
  static void TILEWISE_JOIN(case_, __LINE__)();                                                                  \
  static ::tilewise::testing::Register TILEWISE_JOIN(register_, __LINE__)(name, TILEWISE_JOIN(case_, __LINE__)); \
  static void TILEWISE_JOIN(case_, __LINE__)()
#define EXPECT(condition) ::tilewise::testing::expect((condition), #condition, __FILE__, __LINE__)
#define EXPECT_EQ(a, b) ::tilewise::testing::expect_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define TILEWISE_TEST_MAIN \
  int main(int argc, char** argv) { return ::tilewise::testing::run(argc, argv); }
