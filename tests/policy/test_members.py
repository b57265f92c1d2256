"""What counts as a member, on small classes: the counter behind `test_no_class_has_too_many_members`."""

import ast

import pytest

from policy.members import native_classes, python_classes

NATIVE = """
#define NOT_A_MEMBER struct Odd { int x; };
enum class Colour { kRed, kGreen };        // struct Comment { int x; };
struct Forward;
template <class T, class... Rest>
class alignas(64) [[nodiscard]] Thing final : public Base<T, int>, private Other {
 public:
  explicit Thing(int a) : first_(a), second_{a}, both_{{1, 2}} {}                  // 1
  Thing(const Thing&) = delete;                                                    // 2
  ~Thing();                                                                        // 3
  using Map = std::map<int, std::pair<int, int>>;                                  // 4
  friend class Friend;
  friend bool operator==(const Thing&, const Thing&) { return true; }
  static_assert(sizeof(int) == 4, "a, b; c");
  [[nodiscard]] int size() const { if (first_) { return 1; } return '}'; }         // 5
  T& operator[](int at) { return table_[at]; }                                     // 6
  bool operator<(const Thing& other) const;                                        // 7
  int operator()(int a, int b) const { return a << b; }                            // 8
  explicit operator bool() const { return true; }                                  // 9
  template <class U, int N = 3>
  std::array<U, N> make(U a, U b) const;                                           // 10
  struct Inner { int a, b, c; };                                                   // 11
  struct Later;                                                                    // 12
  struct Later { int d; };
  enum class State : uint8_t { kOn, kOff };                                        // 13
 private:
  static constexpr int kBits = 1 << 3, kMore = 2;                                  // 14, 15
  union {
    int leaf;                                                                      // 16
    int before;                                                                    // 17
  };
  struct { int x; } unnamed_, again_;                                              // 18, 19
  std::map<int, int> map_, other_map_{{1, 2}};                                     // 20, 21
  std::function<void(int, int)> call_ = [](int a, int b) { return a, b; };         // 22
  alignas(128) std::atomic<int> word_{0};                                          // 23
  int *first_, second_ = f(1, 2), table_[4][2] = {{1, 2}, {3}};                    // 24, 25, 26
  struct Elsewhere* elsewhere_;                                                    // 27
};
struct Thing<int>::Later { int d; void e(); };
struct stat info{};
struct Outer make(struct Outer o) { return o; }
typedef struct pto_thing { unsigned kind; const char* names[2]; } pto_thing;
"""
COUNTS = [("Thing", 27), ("Inner", 3), ("Later", 1), ("Later", 2), ("pto_thing", 2)]


def test_members_of_native_classes():
    """Functions, fields, constants and nested types count; friends, assertions and forward declarations do not."""
    assert list(native_classes(NATIVE)) == COUNTS


@pytest.mark.parametrize(
    ("more", "count"),
    [("int x;", 28), ("void f();", 28), ("int x, y;", 29), ("friend class X;", 27), (";", 27)],
)
def test_another_native_member_is_noticed(more, count):
    """Each further declaration adds what it declares."""
    changed = NATIVE.replace(" private:\n", f" private:\n  {more}\n", 1)
    assert dict(native_classes(changed))["Thing"] == count


def test_a_file_that_cannot_be_read_is_no_file_without_classes():
    """Brackets that do not match are an error, not zero members."""
    with pytest.raises(ValueError, match="never closed"):
        list(native_classes("struct Half { int a;"))


PYTHON = '''
class Thing(Base):
    """A docstring is none."""

    LIMIT = 3
    name: str
    first, second = 1, 2

    class Inner:
        deep = 1

    def __init__(self, a):
        self.a, self._b = a, 0
        self.c: int = 0
        local = 1
        a.other = 2

    def run(self):
        self.a += 1
        self.late = 1

    @property
    def size(self):
        return 1

    @size.setter
    def size(self, value):
        self._b = value
'''


def test_members_of_python_classes():
    """Methods once by name, class attributes, nested classes, and what any method sets on self."""
    named = {"LIMIT", "name", "first", "second", "Inner", "__init__", "a", "_b", "c", "run", "late", "size"}
    assert dict(python_classes(ast.parse(PYTHON))) == {"Thing": len(named), "Inner": 1}
