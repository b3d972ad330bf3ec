// SPDX-License-Identifier: GPL-2.0-only
//! Whether the packages agree with the program. Not for what they do on a host: that is seen in the lab (`cohort-tests service`).

const VERSION: &str = env!("CARGO_PKG_VERSION");

#[test]
fn the_debian_package_has_the_programs_version() {
    let changelog = include_str!("../../debian/changelog");
    assert!(
        changelog.starts_with(&format!("cohort ({VERSION}) ")),
        "{changelog}"
    );
}

#[test]
fn the_manifest_asks_for_the_image_of_this_version() {
    let manifest = include_str!("../kubernetes/cohort.yaml");
    let images = manifest.matches("image: ").count();
    let of_this_version = manifest.matches(&format!("/cohort:{VERSION}\n")).count();
    assert!(
        images > 0 && of_this_version == images,
        "{of_this_version} of {images}"
    );
}
