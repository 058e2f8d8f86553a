// Compiled once an instruction set, in the namespace TB_ISA. Placeholder.
namespace tb::TB_ISA {

int threads();

// The number of threads a parallel region gets.
int threads() {
    int count = 0;
#pragma omp parallel reduction(+ : count)
    count += 1;
    return count;
}

}  // namespace tb::TB_ISA
