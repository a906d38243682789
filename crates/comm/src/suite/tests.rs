//! The in-process ranks pass the suite.

use super::{Case, Threads, books, collectives, faults, order, published, random};

fn run(cases: &[Case]) {
    for case in cases {
        println!("{}", case.name);
        if let Err(error) = (case.run)(&Threads) {
            panic!("{}: {error}", case.name);
        }
    }
}

#[test]
fn collectives_of_every_type_and_size() {
    run(collectives::CASES);
}

#[test]
fn order_of_operations_and_groups() {
    run(order::CASES);
}

#[test]
fn published_exchanges() {
    run(published::CASES);
}

#[test]
fn books_equal_formulas() {
    run(books::CASES);
}

#[test]
fn random_sequences() {
    run(random::CASES);
}

#[test]
fn faults_are_told() {
    run(faults::CASES);
}
