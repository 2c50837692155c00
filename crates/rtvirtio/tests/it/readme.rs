//! README.md says what is true.

use std::path::Path;

#[test]
fn specification_in_the_readme_is_accepted() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let text = std::fs::read_to_string(path).expect("README.md is at the top");
    let (_, rest) = text.split_once("```toml\n").expect("README.md shows a specification");
    let (example, _) = rest.split_once("```").expect("the block ends");

    let specification = rtvirtio_spec::specification::parse("README.md", example);
    let specification = specification.unwrap_or_else(|error| panic!("{error}"));

    let background: Vec<bool> = specification.vms.iter().map(|vm| vm.is_background()).collect();
    assert_eq!(background, [false, true]);
}
